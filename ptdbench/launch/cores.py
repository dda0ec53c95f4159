"""CPU cores of a rank, and its number of threads: launchers bind ranks in their own ways, or not."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Cores = frozenset[int]


def mine() -> Cores:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def share(of_ranks: Sequence[Cores], local_rank: int, wanted: int | Literal["auto"]) -> tuple[int, Cores | None]:
    """Return the threads of a rank, and the cores to bind it to.

    Args:
        of_ranks: The cores that each rank of the node may run on, by local rank. Ranks that a launcher has bound
            have cores of their own; the others share all that there are.
        local_rank: Which of the ranks.
        wanted: Cores for each rank, or ``auto`` for an equal share.

    Returns:
        ``(threads, cores)``; the cores are ``None`` where the rank stays as it is: no number was asked for, or there
        are not as many for every rank.
    """
    own = of_ranks[local_rank]
    sharing = [rank for rank, cores in enumerate(of_ranks) if cores & own]
    if wanted == "auto":
        return max(1, len(own) // len(sharing)), None
    place = sharing.index(local_rank) * wanted
    alike = all(of_ranks[rank] == own for rank in sharing)
    if not alike or len(own) < len(sharing) * wanted:
        return wanted, None
    return wanted, frozenset(sorted(own)[place : place + wanted])


def bind(threads: int, cores: Cores | None) -> None:
    """Keep this process to ``threads`` threads, and to ``cores`` if there are any."""
    import torch

    _given()
    # Both: torch may have fixed its number when it was imported, and other libraries read the variable.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        # Every thread: one that runs already does not follow the main thread to other cores.
        threads_now = Path("/proc/self/task")
        for thread in [int(path.name) for path in threads_now.iterdir()] if threads_now.exists() else [0]:
            os.sched_setaffinity(thread, cores)


def unbind_thread() -> None:
    """Let the calling thread run on all cores that this process was given, also on those that :func:`bind` took.

    For work beside the steps, which would otherwise take its turns on a core that computes while another may be idle.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), _given())


@cache
def _given() -> Cores:
    """Return the cores that this process could run on when first asked, which :func:`bind` does before it binds."""
    return mine()
