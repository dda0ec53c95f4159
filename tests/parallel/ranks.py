"""A few lines of a test on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.launch import rendezvous
from tests.shared_ranks import SharedRanks

#: Ends after each module; see tests/conftest.py.
RANKS = SharedRanks()

_groups = 0


def on_ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(*arguments)`` returns in each of ``size`` ranks that share a gloo group, by rank."""
    return RANKS.call(size, _in_group, body, arguments)


def _in_group(body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    global _groups  # noqa: PLW0603 - each group needs a name of its own in the ranks' store
    _groups += 1
    torch.set_num_threads(1)
    store = dist.PrefixStore(f"group {_groups}", rendezvous.store())
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    result = body(*arguments)
    dist.destroy_process_group()
    return result
