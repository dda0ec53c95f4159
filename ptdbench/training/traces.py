"""Traces in the directory of a run: one of each rank, and one of all ranks for Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ptdbench.job import Job
from ptdbench.launch.together import gather
from ptdbench.measure import perfetto
from ptdbench.terminal import say


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
        say(f"warning: not all traces could be written: {error}", sys.stderr)


def _of_rank(job: Job, folder: str, rank: int) -> Path:
    return job.directory / folder / f"rank{rank}.json.gz"


def facts(job: Job) -> dict[str, object]:
    """By what Holistic Trace Analysis tells ranks apart."""
    return {"backend": job.spec.backend, "rank": job.world.rank, "world_size": job.world.size}
