"""Precision of the arithmetic: fp32, bf16, or fp16 with loss scaling. Master weights are always fp32."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ptdbench.parallel.activations import wrap_forward

Name = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[Name, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def arithmetic(precision: Name, device_type: str) -> str:
    """The arithmetic of matrix products; under ``fp32`` it is ``tf32`` if torch's settings allow that."""
    tf32 = device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if precision == "fp32" and tf32 else precision


def autocast_forward(module: nn.Module, precision: Name, device_type: str) -> None:
    """Let ``module.forward`` compute its matrix products in ``precision``; fp32 leaves it as it is.

    The context covers only the forward, as autocast requires, also under a pipeline schedule.
    """
    if precision != "fp32":
        wrap_forward(module, torch.autocast(device_type, DTYPES[precision]))


class AgreedGradScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks skip a step together.

    An overflow may show on one rank only: in one stage of a pipeline, or in one shard of a weight. A rank that
    skipped alone would leave the others with different weights and a different scale.
    """

    def __init__(self, device: str, enabled: bool) -> None:
        super().__init__(device, enabled=enabled)
        if enabled:  # torch sets this up when a loss is scaled, which never happens on a pipeline's first stages
            self._lazy_init_scale_growth_tracker(torch.device(device))

    def _unscale_grads_(self, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*arguments, **options)
        for overflow in found.values():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return found
