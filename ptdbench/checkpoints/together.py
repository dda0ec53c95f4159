"""What all ranks know, put together."""

from __future__ import annotations

from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's ``value``, by rank; called in all ranks of ``group``. Without a group this process is alone."""
    if group is None:
        return [value]
    values = cast("list[T]", [None] * dist.get_world_size(group))
    dist.all_gather_object(values, value, group=group)
    return values


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group``, and how many there are."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
