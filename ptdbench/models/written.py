"""Finds the weights that a forward pass changes in place, as that of a momentum encoder does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptdbench.models.chain import unchanged

#: Up to as many weights a forward pass on the CPU, and a copy of the weights, cost little.
_SMALL = 10_000_000


def written_weights(module: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """Return the names of the weights that a forward pass in training changes in place.

    It is tried on the meta device; if it does not run there, as it reads values, on a copy of a small module's tensors.

    Args:
        module: Called as ``module(inputs, targets)``; its own tensors are not changed.
        inputs: One sample, batch dimension included, on the meta device.
        targets: Its targets, likewise.

    Returns:
        The names; none if the forward pass cannot be tried.
    """
    is_small = sum(weight.numel() for weight in module.parameters()) <= _SMALL
    for copied in (lambda tensor: torch.empty_like(tensor, device="meta"), *([torch.clone] if is_small else [])):
        with suppress(Exception):  # third-party code may raise anything
            return _written(module, [inputs, targets], copied)
    return []


def _written(module: nn.Module, example: Sequence[Tensor], copied: Callable[[Tensor], Tensor]) -> list[str]:
    weights, buffers = (
        {name: copied(one.detach()).requires_grad_(one.requires_grad) for name, one in named}
        for named in (module.named_parameters(), module.named_buffers())
    )
    device = next(iter(weights.values())).device
    two = [torch.zeros((2, *one.shape[1:]), dtype=one.dtype, device=device) for one in example]  # for batch norms
    before = {name: _memory(weight) for name, weight in weights.items()}
    with unchanged(module), torch.random.fork_rng(devices=[]), _Writes() as writes:
        module.train()
        functional_call(module, weights | buffers, tuple(two))
    # A weight's ``.data`` may also be replaced, which is no operation.
    return [
        name for name, weight in weights.items() if before[name] in writes.memory or _memory(weight) != before[name]
    ]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Writes(TorchDispatchMode):
    """Notes the memory that operations write to: version counters do not show what goes through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
        for one in func._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                found = tree_leaves(given.get(one.name))
                self.memory |= {_memory(tensor) for tensor in found if isinstance(tensor, Tensor)}
        return func(*args, **(kwargs or {}))
