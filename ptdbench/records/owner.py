"""Whose a run's record is: of one start of the run, and of no other.

A run may be started again in its directory while a process of the earlier start still lives somewhere: on a node that
was lost, or because nobody could end it. Each start therefore has a name, the record says which start opened it, and
the processes of every other one leave it alone.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ptdbench.records import store
from ptdbench.terminal import say

#: Seconds to wait for another process that writes the record: one that is stopped just then must not stop all.
_PATIENCE = 2.0


@dataclass(frozen=True)
class Owner:
    """The process that opened a record.

    Attributes:
        launch: The name of its start of the run.
        host: Its machine.
        pid: Its process id there.
        started: When it was created, in seconds since the epoch: process ids are used again.
        job: Its SLURM job as squeue writes it, ``123`` or ``123_4``; ``None`` outside of one.
    """

    launch: str
    host: str
    pid: int
    started: float
    job: str | None


def this_process(launch: str, environ: Mapping[str, str]) -> Owner:
    """This process, as the owner of what it opens.

    Args:
        launch: The name of this start.
        environ: Its environment.
    """
    return Owner(launch, socket.gethostname(), os.getpid(), psutil.Process().create_time(), slurm_job(environ))


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """The SLURM job that an environment belongs to, in squeue's words."""
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return environ.get("SLURM_JOB_ID") or None


@dataclass(frozen=True)
class Attempt:
    """One start of a run, and what is its own in the run's directory.

    Attributes:
        directory: The run's directory.
        launch: The name of the start, the same in all its processes; fit to be a file's name.
        draft: The record as this start opened it, if this process knows: it counts where the file is gone or damaged.
    """

    directory: Path
    launch: str
    draft: Mapping[str, Any] | None = None

    @property
    def failures(self) -> Path:
        """Where the ranks of this start leave their reports and stacks. Those of an earlier start stay beside it."""
        return self.directory / "failures" / self.launch

    def owns(self, record: Mapping[str, Any]) -> bool:
        """Whether this start may write a record: it opened it, or nobody has yet."""
        owner = record.get("owner")
        return not owner or owner["launch"] == self.launch

    def amend(self, change: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """Write the run's record anew, unless it belongs to another start by now; then a line on stderr says so.

        Args:
            change: Makes the new record from the one on disk, or ``None`` to leave it. The ranks come one after the
                other, so that the one who knows most has the last word.

        Returns:
            What was written, or ``None`` if nothing was.

        Raises:
            OSError: There is no record, or it cannot be written.
        """
        with locked(self.directory):
            written = self._written()
            if not self.owns(written):
                say(f"{self.directory}: the run was started again; its record is left unchanged", sys.stderr)
                return None
            if (changed := change(written)) is not None:
                store.write_record(self.directory, changed)
            return changed

    def _written(self) -> dict[str, Any]:
        if self.draft is None:
            return store.load_record(self.directory)
        return store.earlier_record(self.directory) or dict(self.draft)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Alone with a directory, as far as its file system has locks and those who hold it get on.

    The directory itself is locked: a file would have to stay in it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    until = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < until and not _try_lock(descriptor):
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether there is nothing to wait for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
