"""A few lines of a test on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.launch import rendezvous
from tests.shared_ranks import SharedRanks

#: For whole runs; they end after each module, see tests/conftest.py.
RANKS = SharedRanks()


def on_ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(*arguments)`` returns in each of ``size`` ranks that share a gloo group, by rank.

    Ranks of its own: torch keeps plans for DTensors by the shape of a mesh, with names of groups that are no more.
    """
    ranks = SharedRanks()
    try:
        return ranks.call(size, _in_group, body, arguments)
    finally:
        ranks.end()


def _in_group(body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=rendezvous.store(), rank=rank, world_size=size)
    result = body(*arguments)
    dist.destroy_process_group()
    return result
