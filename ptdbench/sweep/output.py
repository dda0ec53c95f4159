"""What a job wrote to standard error, SLURM's own words among it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ptdbench.records import ledger

#: Bytes at the end of a file that are looked at.
_LOOKED_AT = 65536

#: How SLURM says that a job used too much memory. With OverMemoryKill (slurm.conf, JobAcctGatherParams) it says so here
#: only, and that the job has FAILED.
_OUT_OF_MEMORY = re.compile(
    r"(slurm\w+[\w.-]*|srun): error: .*(exceeded (job )?memory limit|oom[-_]kill|out of memory)", re.IGNORECASE
)


def tail(job: ledger.Job, lines: int = 15) -> str:
    """The last lines of the rank that wrote last."""
    return "\n".join(next((said[-lines:] for said in _ends(job) if said), []))


def out_of_memory(job: ledger.Job) -> str | None:
    """The line with which SLURM says that the job used too much memory, if it does."""
    return next((line.strip() for said in _ends(job) for line in said if _OUT_OF_MEMORY.search(line)), None)


def reason(job: ledger.Job) -> str | None:
    """What kept a step from starting: the first error of SLURM or of its plugins, else the last line of the rank.

    srun's own lines only say that there was one.
    """
    for said in _ends(job):
        errors = [match[1] for line in said if (match := re.match(r"slurmstepd\S*: error: (.*)", line))]
        others = [line.strip() for line in said if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
        if errors or others:
            return errors[0] if errors else others[-1]
    return None


def _ends(job: ledger.Job) -> Iterator[list[str]]:
    """The last lines of each rank, of the one that wrote last first; then those of the script of several runs."""
    folders = [Path(job.log), *([Path(job.log).parent] if job.step is not None else [])]
    logs = [
        path
        for folder in folders
        for path in sorted(folder.glob(f"{job.id}_*_log.err"), key=lambda path: -path.stat().st_mtime)
        if path.is_file()
    ]
    for path in logs:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOOKED_AT))
            yield file.read().decode(errors="replace").splitlines()
