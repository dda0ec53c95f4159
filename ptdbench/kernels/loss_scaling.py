"""Loss scaling for fp16 whose ranks skip a step together."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptdbench.local_part import local_part


class AgreedGradScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks skip a step together, also if only one stage or one shard of a weight overflows."""

    def __init__(self, device: str, enabled: bool) -> None:
        super().__init__(device, enabled=enabled)
        if enabled:  # torch does so when it scales a loss, which the first stages of a pipeline never do
            self._lazy_init_scale_growth_tracker(torch.device(device))

    @torch.no_grad()
    def _unscale_grads_(self, optimizer: Any, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        # By local parts: torch itself would all-reduce the overflows of DTensors, once in each dimension.
        parts = [_local_with_gradient(weight) for group in optimizer.param_groups for weight in group["params"]]
        local: Any = SimpleNamespace(param_groups=[{"params": parts}])
        overflows = super()._unscale_grads_(local, *arguments, **options)
        for overflow in overflows.values():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return overflows


def _local_with_gradient(weight: Tensor) -> Tensor:
    """Return a weight itself, or this rank's shard of it and of its gradient."""
    if not isinstance(weight, DTensor) or weight.grad is None:
        return weight
    part = local_part(weight).detach()
    part.grad = local_part(weight.grad)
    return part
