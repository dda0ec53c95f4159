"""The ledger of a sweep: its request and its jobs, in ``sweep.json`` in its directory.

It is written before the first run begins. Each job array is recorded before and after its submission, so that a process
killed in between leaves no unknown job.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ptdbench.files import read_bytes, write_json
from ptdbench.records import schema
from ptdbench.records.store import TRIES, Damaged

LEDGER = "sweep.json"

#: The log of SLURM's messages about a job, beside the jobs' log folders, as the job's own may not exist yet.
LOG_OF_SLURM = "%j_slurm.log"


class Job(Struct, frozen=True):
    """One run that was submitted, or was about to be; several runs may share one SLURM job."""

    number: int  #: The run's number in the sweep.
    name: str  #: The unique name of its array in the queue.
    element: int | None  #: Its index in the array; ``None`` for a single job.
    id: str | None  #: SLURM's job id, ``123`` or ``123_0``; ``None`` before it is known.
    shape: str  #: Nodes and ranks, as text.
    directory: str  #: The run's directory, below the sweep's.
    log: str  #: Folder of the ranks' output, with ``%j`` for an id that is not known yet.
    step: int | None = None  #: The run's index among those of its job; ``None`` if it is the only one.
    cluster: str | None = None  #: SLURM's name of the cluster whose queue it is in; ``None`` if unknown.


class Ledger(Struct, frozen=True):
    """The request of a sweep: its overrides, without Hydra's own options, and the last job of each run, by number."""

    overrides: list[str]
    jobs: list[Job]


def with_id(job: Job, identity: str) -> Job:
    """Return the same job with its SLURM id."""
    return replace(job, id=identity, log=job.log.replace("%j", identity))


def sweep_of(directory: Path) -> Path | None:
    """Return the sweep that contains a run's directory, if any; short runs that try a micro-batch belong to none."""
    directory = directory.absolute()
    sweep = around(directory.parent)
    return None if sweep and TRIES in directory.relative_to(sweep).parts else sweep


def around(folder: Path) -> Path | None:
    """Return the nearest sweep directory: a folder or one of its parents, as ``hydra.sweep.subdir`` may be nested."""
    return next((parent for parent in (folder, *folder.parents) if is_ledger(parent / LEDGER)), None)


def is_ledger(path: Path) -> bool:
    """Return whether a file may be a ledger, perhaps a damaged one: other programs use this file name, too."""
    try:
        content = json.loads(read_bytes(path))
    except FileNotFoundError:
        return False
    except (ValueError, OSError):
        return path.exists()
    return isinstance(content, dict) and {*Ledger.__struct_fields__} <= content.keys()


def begin(sweep_directory: Path, overrides: Sequence[str]) -> None:
    """Write the request of a sweep; existing jobs are kept."""
    write(sweep_directory, Ledger(list(overrides), read(sweep_directory).jobs))


def add(sweep_directory: Path, jobs: Sequence[Job]) -> None:
    """Add jobs to the ledger; jobs of other runs are kept."""
    ledger = read(sweep_directory)
    by_directory = {job.directory: job for job in [*ledger.jobs, *jobs]}
    write(sweep_directory, Ledger(ledger.overrides, sorted(by_directory.values(), key=lambda job: job.number)))


def write(sweep_directory: Path, ledger: Ledger) -> None:
    """Replace the ledger; raises OSError."""
    write_json(sweep_directory / LEDGER, ledger)


def read(sweep_directory: Path) -> Ledger:
    """Read the ledger; empty if there is none. Raises Damaged, or PermissionError."""
    path = sweep_directory / LEDGER
    try:
        return schema.read(read_bytes(path), Ledger)
    except FileNotFoundError:
        return Ledger([], [])
    except PermissionError:  # no damage
        raise
    except (ValueError, OSError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None
