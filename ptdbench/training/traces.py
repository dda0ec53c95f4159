"""Traces in the directory of a run, one of each rank and one of all, and the offsets of the ranks' clocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import Peer
from ptdbench.profiling import perfetto
from ptdbench.terminal import echo

#: Messages there and back; the fastest one counts.
_TRIES = 10


def clock_ahead(peers: Sequence[Peer], rank: int, device: torch.device) -> float:
    """Seconds by which this rank's clock is ahead of that of rank 0; called in all ranks.

    Ranks of one machine have one clock. One rank of each other machine asks rank 0 for the time, as NTP does
    (RFC 5905): rank 0 is taken to have answered halfway between the question and the answer.
    """
    first: dict[str, int] = {}
    for peer in peers:
        first.setdefault(peer.host, peer.rank)
    found = 0.0
    for asking in first.values():
        if asking and rank in (0, asking):
            found = _answer(asking, device) if rank == 0 else _ask(device)
    of_ranks: list[float] = gather(found)
    return of_ranks[first[peers[rank].host]]


def _ask(device: torch.device) -> float:
    """The least uncertain of several differences to the clock of rank 0."""
    best = (float("inf"), 0.0)
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TRIES):
        asked = time.time()
        dist.send(message, 0)
        dist.recv(message, 0)
        theirs = message.item()
        answered = time.time()
        best = min(best, (answered - asked, (asked + answered) / 2 - theirs))
    return best[1]


def _answer(asking: int, device: torch.device) -> float:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TRIES):
        dist.recv(message, asking)
        message.item()  # NCCL makes only the device wait
        message.fill_(time.time())
        dist.send(message, asking)
    return 0.0


def keep(job: Job, folder: str, write: Callable[[Path], None], names: Sequence[str], ahead: float, name: str) -> None:
    """Let each rank write its trace, and rank 0 one of all ranks.

    Called in all ranks; one that cannot write costs the traces, and not the run.

    Args:
        job: The run.
        folder: In the run's directory, for the traces of single ranks.
        write: Writes this rank's trace to a compressed file.
        names: What each rank is called.
        ahead: Seconds by which this rank's clock is ahead of that of rank 0.
        name: The file of all ranks in the run's directory.
    """
    error = None
    try:
        (job.directory / folder).mkdir(exist_ok=True)
        write(_of_rank(job, folder, job.world.rank))
    except (OSError, RuntimeError, ValueError) as failed:
        error = str(failed)
    told: list[tuple[float, str | None]] = gather((ahead, error))
    if not job.world.is_first:
        return
    error = next((one for _, one in told if one), None)
    if not error:
        try:
            of_ranks = [_of_rank(job, folder, rank) for rank in range(job.world.size)]
            perfetto.merge(of_ranks, names, [offset for offset, _ in told], job.directory / name)
        except (OSError, RuntimeError, ValueError) as failed:
            error = str(failed)
    if error:
        echo(f"warning: not all traces could be written: {error}", sys.stderr)


def _of_rank(job: Job, folder: str, rank: int) -> Path:
    return job.directory / folder / f"rank{rank}.json.gz"


def facts(job: Job) -> dict[str, object]:
    """Return the facts by which Holistic Trace Analysis tells ranks apart."""
    return {"backend": job.spec.backend, "rank": job.world.rank, "world_size": job.world.size}
