"""Ownership of a run's directory and record: they belong to exactly one start of the run at a time.

A run may be restarted in its directory while a process of the earlier start is still alive, for example on a lost
node. Each start therefore has a name, the record says which start opened it, and processes of other starts do not
write it.

The record names the process that opened it. While it is open, and that process or its job is alive, no other may open
it: two jobs of one run would overwrite each other's checkpoints. Beside the record is the run's progress, to be watched
from other machines.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from msgspec import Struct

from ptdbench.files import read_bytes, write_json
from ptdbench.launch import slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import record, schema, store
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Draft, Owner, Written
from ptdbench.terminal import echo

#: Seconds to wait for another process that is writing the record: a suspended one must not block the others.
_PATIENCE = 2.0

#: The file with a run's progress.
PROGRESS = "progress.json"


def this_process(launch: str, environ: Mapping[str, str]) -> Owner:
    """Return this process, with its environment, as the owner of the start ``launch``."""
    return Owner(launch, socket.gethostname(), os.getpid(), psutil.Process().create_time(), slurm_job(environ))


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """Return the SLURM job of an environment, as squeue prints it."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return environ.get("SLURM_JOB_ID") or None


@dataclass(frozen=True)
class Attempt:
    """One start of a run, and its files in the run's directory."""

    directory: Path  #: The run's directory.
    launch: str  #: The name of the start, the same in all its processes; valid as a file name.
    #: The record as this start opened it, if known: used if the file is missing or damaged.
    draft: Written | None = None

    @property
    def failures(self) -> Path:
        """The folder of the failure reports and stacks of this start; those of an earlier start are kept beside it."""
        return self.directory / "failures" / self.launch

    def owns(self, record: Written) -> bool:
        """Return whether this start may write a record: it opened it, or no start has yet."""
        owner = record.get("owner")
        return not owner or owner["launch"] == self.launch

    def amend(self, change: Callable[[Draft], Written | None], durable: bool = True) -> Written | None:
        """Update the run's record, unless it now belongs to another start, which is reported on stderr.

        ``change`` maps the record on disk to the new one, or to ``None`` to leave it unchanged; concurrent calls of
        several ranks are serialized. If ``durable``, the new record survives a crash of the machine. Returns the record
        written, or ``None``.

        Raises:
            OSError: There is no record, or it cannot be written.
        """
        with locked(self.directory):
            if self.draft is None:
                written = store.load_record(self.directory)
            else:
                earlier = store.load_or_set_aside(self.directory)
                written = earlier.written if earlier else dict(self.draft)
            if not self.owns(written):
                echo(f"{self.directory}: the run was started again; its record is left unchanged", sys.stderr)
                return None
            if (changed := change(written)) is not None:
                store.write_record(self.directory, changed, durable)
            return changed


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory, if its file system supports locks and no other holder hangs."""
    descriptor = os.open(directory, os.O_RDONLY)
    until = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < until and not store.try_lock(descriptor):
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def open_record(directory: Path, draft: Written) -> Written:
    """Write the first record of a start of a run, and return it; results of an earlier start are kept in the draft.

    Raises:
        ConfigError: An earlier start is still running.
        OSError: The record cannot be written.
    """
    with locked(directory):
        if earlier := store.load_or_set_aside(directory):
            _require_ended(directory, earlier, draft.get("owner"))
            draft = record.with_earlier_results(draft, earlier.written)
        with suppress(OSError):  # the progress of an earlier start
            (directory / PROGRESS).unlink()
        store.write_record(directory, draft)
    return draft


def _require_ended(directory: Path, earlier: RunRecord, mine: Written | None) -> None:
    owner = earlier.owner
    if not owner or not earlier.is_open or (mine and owner.launch == mine["launch"]):
        return
    in_other_job = owner.job and owner.job != slurm_job(os.environ)
    who = f"job {owner.job}" if in_other_job else f"process {owner.pid} on {owner.host}"
    if alive := is_alive(owner):
        rule = f"{who} is writing its results there"
        raise ConfigError([Problem("directory", directory, rule, "wait for it, or end it")])
    if alive is None:
        echo(f"{directory}: was opened by {who}; whether that has ended cannot be determined from here", sys.stderr)


def is_alive(owner: Owner) -> bool | None:
    """Return whether the owner of an open record is alive; ``None`` if that cannot be determined from here."""
    is_here = owner.host == socket.gethostname()
    is_in_this_job = owner.job == slurm_job(os.environ)
    if owner.job and is_in_this_job and not is_here:
        # Either an earlier start of this job, which was requeued to other nodes, or a concurrent step of it.
        restarts = slurm.restarts(os.environ)
        return False if restarts and not owner.launch.endswith(f"-{restarts}") else None
    if owner.job and not is_in_this_job:
        try:
            state = slurm.queue([owner.job]).get(owner.job)
        except SlurmError:
            return None
        return state is not None and state.state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
    if not is_here:
        return None
    with suppress(psutil.Error):
        return abs(psutil.Process(owner.pid).create_time() - owner.started) < 1.0
    return False


_PROGRESS_SECONDS = 10.0  # often enough to watch a cluster job; shorter intervals show up in make overhead


class Progress(Struct, frozen=True):
    """The progress of a running run: ``step`` of ``steps``, and ``unit`` ``per_second``."""

    step: schema.Whole
    steps: schema.Whole
    unit: str
    per_second: float | None


class ProgressFile:
    """``progress.json``, kept up to date: soon after the first steps, every ten seconds and at the end.

    ``unit`` is what throughput counts: ``tokens`` or ``samples``.
    """

    def __init__(self, directory: Path, unit: str) -> None:
        self._path = directory / PROGRESS
        self._unit = unit
        self._next = 0.0

    def write(self, step: int, steps: int, per_second: float | None, now: float) -> None:
        """Write the file if it is due; ``now`` is in seconds by a monotonic clock."""
        if now < self._next and step < steps:
            return
        self._next = now + _PROGRESS_SECONDS
        with suppress(OSError):  # a run must not fail because its progress cannot be written
            write_json(self._path, Progress(step, steps, self._unit, per_second), durable=False)


def read_progress(directory: Path) -> Progress | None:
    """Read ``progress.json``; ``None`` if it is not written yet, or damaged."""
    try:
        return schema.read(read_bytes(directory / PROGRESS), Progress)
    except (OSError, ValueError):
        return None
