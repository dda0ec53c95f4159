"""Batch normalization over the micro-batches of all ranks, on any device.

torch's SyncBatchNorm refuses CPU tensors. There the same is computed with differentiable all-reduces, so that a ResNet
under ddp or fsdp can be compared with a single process on any device.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import _AllReduce  # all_reduce itself is deprecated, and refuses torch.compile
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


def over_ranks(
    group: dist.ProcessGroup,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize ``(N, C, ...)`` over the samples of a group's ranks, equally many on each as ``BatchPlan`` ensures.

    The other arguments are those of :func:`torch.nn.functional.batch_norm` in training. The result has the dtype of the
    input; statistics are fp32.
    """
    if input.is_cuda:
        tensors = input.contiguous(), weight, bias, running_mean, running_var
        return SyncBatchNorm.apply(*tensors, eps, momentum, group, dist.get_world_size(group))
    dtype, input = input.dtype, input.to(torch.promote_types(input.dtype, torch.float32))
    across = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // input.size(1) * dist.get_world_size(group)
    # Two passes: a variance as E[x²] - E[x]² cancels catastrophically where the mean is large.
    mean = _AllReduce.apply(dist.ReduceOp.SUM, group, input.sum(across)) / count
    shape = [1, -1] + [1] * (input.dim() - 2)
    centered = input - mean.view(shape)
    variance = _AllReduce.apply(dist.ReduceOp.SUM, group, centered.square().sum(across)) / count
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.detach(), momentum)
        running_var.lerp_(variance.detach() * count / (count - 1), momentum)
    normal = centered * torch.rsqrt(variance + eps).view(shape)
    return (normal if weight is None or bias is None else normal * weight.view(shape) + bias.view(shape)).to(dtype)


class _OverRanks(TorchFunctionMode):
    """Lets ``F.batch_norm`` normalize over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.is_used = True
        return over_ranks(self._group, *args, **(kwargs or {}))


@cache
def _synchronized(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """Return the class of a kind's layers that normalize over all ranks."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if not self.training:
            return kind.forward(self, *arguments, **options)
        with _OverRanks(self.process_group) as mode:
            outputs = kind.forward(self, *arguments, **options)
        if not mode.is_used:
            raise TypeError(f"{kind.__name__} cannot normalize over all ranks: it does not call F.batch_norm")
        return outputs

    return type(kind.__name__, (kind,), {"forward": forward})


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Let every BatchNorm layer of ``model`` normalize over the ranks of ``group``; layers stay the same objects."""
    if dist.get_world_size(group) == 1:
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kind: Any = type(module)
            is_torchs = kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
            module.__class__ = nn.SyncBatchNorm if is_torchs and device.type == "cuda" else _synchronized(kind)
            module.process_group = group  # type: ignore[assignment]
