"""Batch normalization over the micro-batches of all ranks, on any device.

torch's SyncBatchNorm refuses CPU tensors. There the same is computed with differentiable all-reduces, so that a ResNet
under ddp or fsdp can be compared with a single process on any device.
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
    """Batch normalization over the samples of all ranks, equally many on each as ``BatchPlan`` ensures."""

    process_group: dist.ProcessGroup

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (N, C, ...), got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``(N, C, ...)``, keeping its dtype; statistics are fp32. In eval mode the same as BatchNorm."""
        if not self.training:
            return super().forward(input)
        dtype, input = input.dtype, input.to(torch.promote_types(input.dtype, torch.float32))
        across = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // input.size(1) * dist.get_world_size(self.process_group)
        # Two passes: a variance as E[x²] - E[x]² cancels catastrophically where the mean is large.
        mean = _Total.apply(input.sum(across), self.process_group) / count
        shape = [1, -1] + [1] * (input.dim() - 2)
        centered = input - mean.view(shape)
        variance = _Total.apply(centered.square().sum(across), self.process_group) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            # Without momentum, the running statistics average all batches.
            share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_(variance.detach() * count / (count - 1), share)
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        return (normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal).to(dtype)


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Let every BatchNorm layer of ``model`` normalize over the ranks of ``group``; layers stay the same objects."""
    kind = nn.SyncBatchNorm if device.type == "cuda" else HostSyncBatchNorm
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = kind
            cast(HostSyncBatchNorm, module).process_group = group
