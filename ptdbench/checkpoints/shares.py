"""Which rank saves what: ranks that hold the same tensor, or the same part of it, share the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from ptdbench.checkpoints.together import gathered, place

#: A name, and where in the whole tensor the part that a rank holds begins.
Part = tuple[str, tuple[int, ...]]


class Shares:
    """Selects the tensors that this rank saves, so that each is saved once and all ranks have about as many bytes.

    Args:
        group: All ranks, on the CPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._held: dict[Part, int] | None = None
        self._names: set[str] = set()

    def select(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's share of ``tensors``; called in all ranks, each with all that it holds."""
        held = _parts(tensors)
        if any(gathered(held != self._held, self._group)):  # at the first save, and rarely later
            self._held = held
            mine = assign(gathered(held, self._group))[place(self._group)[0]]
            self._names = {name for name, _ in mine}
        return {name: tensor for name, tensor in tensors.items() if name in self._names}


def assign(held: Sequence[Mapping[Part, int]]) -> list[set[Part]]:
    """The parts that each rank saves.

    Args:
        held: The bytes of each part that a rank holds, by rank.
    """
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    shares: list[set[Part]] = [set() for _ in held]
    bytes_of = [0] * len(held)

    def least_choice_first(part: Part) -> tuple[int, int, Part]:
        return len(holders[part]), -held[holders[part][0]][part], part

    for part in sorted(holders, key=least_choice_first):
        rank = min(holders[part], key=lambda rank: bytes_of[rank])
        shares[rank].add(part)
        bytes_of[rank] += held[rank][part]
    return shares


def _parts(tensors: Mapping[str, Tensor]) -> dict[Part, int]:
    """The bytes of each part in ``tensors``, in the parts that torch writes."""
    items = create_default_local_save_plan(dict(tensors), is_coordinator=False).items
    return {(item.index.fqn, tuple(item.index.offset or ())): item.tensor_storage_size() or 0 for item in items}
