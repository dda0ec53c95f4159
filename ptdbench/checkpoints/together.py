"""Gathering objects from all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from ptdbench.launch import together

T = TypeVar("T")


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's ``value``, by rank; called in all ranks of ``group``. ``None``: this process alone."""
    return [value] if group is None else together.gathered(value, group)


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group``, and the group's size."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
