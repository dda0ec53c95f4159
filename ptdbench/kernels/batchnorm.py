"""Batch normalization over the micro-batches of all ranks, on any device.

torch's SyncBatchNorm refuses CPU tensors. There the same is computed with differentiable all-reduces, so that a ResNet
under ddp or fsdp can be compared with a single process on any device.
"""

import inspect
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


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
        return self.normalized(input, self._counted()) if self.training else _BatchNorm.forward(self, input)

    def normalized(self, input: Tensor, share: float) -> Tensor:
        """Normalize over all ranks; ``share``: the weight of these samples in the running statistics."""
        dtype, input = input.dtype, input.to(torch.promote_types(input.dtype, torch.float32))
        across = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // input.size(1) * dist.get_world_size(self.process_group)
        # Two passes: a variance as E[x²] - E[x]² cancels catastrophically where the mean is large.
        mean = _Total.apply(input.sum(across), self.process_group) / count
        shape = [1, -1] + [1] * (input.dim() - 2)
        centered = input - mean.view(shape)
        variance = _Total.apply(centered.square().sum(across), self.process_group) / count
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_(variance.detach() * count / (count - 1), share)
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        return (normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal).to(dtype)

    def _counted(self) -> float:
        """Count a batch and return its weight in the running statistics; without momentum they average all batches."""
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum


class DeviceSyncBatchNorm(HostSyncBatchNorm):
    """The same on a GPU, by the function of :class:`torch.nn.SyncBatchNorm`."""

    def normalized(self, input: Tensor, share: float) -> Tensor:
        """See :meth:`HostSyncBatchNorm.normalized`."""
        tensors = (input.contiguous(), self.weight, self.bias, self.running_mean, self.running_var)
        return SyncBatchNorm.apply(
            *tensors, self.eps, share, self.process_group, dist.get_world_size(self.process_group)
        )


class _Within(TorchFunctionMode):
    """Lets ``F.batch_norm`` normalize over all ranks: within the forward of a class that adds an activation, say."""

    def __init__(self, norm: HostSyncBatchNorm) -> None:
        super().__init__()
        self._norm = norm
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.is_used = True
        given = inspect.signature(F.batch_norm).bind(*args, **(kwargs or {})).arguments
        return self._norm.normalized(given["input"], given.get("momentum", 0.1))


@cache
def _synchronized(kind: type[_BatchNorm], base: type[HostSyncBatchNorm]) -> type[_BatchNorm]:
    """Return the class of a kind's layers that normalize over all ranks."""
    if not has_forward(kind):
        return base

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if not self.training:
            return kind.forward(self, *given, **named)
        with _Within(self) as within:
            returned = kind.forward(self, *given, **named)
        if not within.is_used:
            raise TypeError(f"{kind.__name__} cannot normalize over all ranks: it does not call F.batch_norm")
        return returned

    return type(kind.__name__, (kind,), {"forward": forward, "normalized": base.normalized})


def has_forward(kind: type[nn.Module]) -> bool:
    """Whether a class of batch norms has a forward of its own."""
    return kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Let every BatchNorm layer of ``model`` normalize over the ranks of ``group``; layers stay the same objects."""
    for module in model.modules() if dist.get_world_size(group) > 1 else ():
        if isinstance(module, _BatchNorm):
            if device.type == "cuda" and not has_forward(type(module)):
                module.__class__ = nn.SyncBatchNorm
            else:
                base = DeviceSyncBatchNorm if device.type == "cuda" else HostSyncBatchNorm
                module.__class__ = _synchronized(type(module), base)  # type: ignore[arg-type]
            cast(HostSyncBatchNorm, module).process_group = group
