"""Batch normalization over the global batch, on any device.

torch's SyncBatchNorm refuses CPU tensors. This module computes the same with differentiable all-reduces, so that a
ResNet under ddp or fsdp can be compared with a single process on any device.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Total(torch.autograd.Function):
    """The sum of a tensor over the ranks. Every rank's loss depends on every rank's tensor, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grads[0], ctx.group), None


class HostSyncBatchNorm(_BatchNorm):
    """Batch normalization with mean and variance over the samples of all ranks.

    Every rank must have equally many samples, as :class:`ptdbench.parallel.batch.BatchPlan` ensures.
    """

    group: dist.ProcessGroup

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (N, C, ...), got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """``(N, C, ...)`` to the same in its dtype; statistics are fp32. In eval mode the same as BatchNorm."""
        if not self.training:
            return super().forward(input)
        dtype, input = input.dtype, input.to(torch.promote_types(input.dtype, torch.float32))
        across = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // input.size(1) * dist.get_world_size(self.group)
        # Two passes: a variance as E[x²] - E[x]² cancels catastrophically where the mean is large.
        mean = _Total.apply(input.sum(across), self.group) / count
        shape = [1, -1] + [1] * (input.dim() - 2)
        centered = input - mean.view(shape)
        variance = _Total.apply(centered.square().sum(across), self.group) / count
        self._update(mean.detach(), variance.detach(), count)
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        return (normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal).to(dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return  # no running statistics
        self.num_batches_tracked.add_(1)
        # Without a momentum BatchNorm keeps the cumulative average of all batches.
        weight = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance * count / (count - 1), weight)


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Let every BatchNorm layer of ``model`` normalize over the ranks of ``group``; names stay as they are."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = HostSyncBatchNorm
            cast(HostSyncBatchNorm, module).group = group
