"""Which rank failed first, and why.

When one rank dies, its peers fail within milliseconds because the connection to it is gone, and the launcher
ends the rest. Every rank therefore leaves a report of its own, and the run's error is picked out of them.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptdbench.records.files import write_json

#: What asks a process to end from outside: a scheduler, a time limit ahead (USR2), or a person.
_STOP_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2"})
_STOPPED = _STOP_SIGNALS | {"Stopped", "SignalException", "KeyboardInterrupt"}

_COMMUNICATION_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TIMEOUT_TEXTS = (
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "operation timeout",
    "application timeout",
)
_COMMUNICATION_TEXTS = (  # gloo, TCPStore and NCCL, in lower case
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "socket closed",
    "broken pipe",
    "remote process exited",
    "remote process exiting",
    "communicator was aborted",
    *_TIMEOUT_TEXTS,
)
_OUT_OF_MEMORY_TEXTS = ("out of memory", "defaultcpuallocator: can't allocate memory", "alloc_failed")


@dataclass(frozen=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: The rank; -1 for the process that starts the ranks.
        type: The exception's class, or the signal's name.
        message: What a person should read.
        traceback: The traceback as text; empty if the process could leave none.
        time: Seconds since the epoch, by the clock of ``host``.
        host: The machine it ran on.
        exit_code: Exit status that its parent saw, ``-n`` after signal ``n``; ``None`` in its own report.
    """

    rank: int
    type: str
    message: str
    traceback: str
    time: float
    host: str
    exit_code: int | None = None

    def as_error(self) -> dict[str, Any]:
        """The ``error`` of a record."""
        return {
            "rank": self.rank,
            "type": self.type,
            "message": self.message,
            "traceback": self.traceback,
        }


def describe(exception: BaseException, rank: int) -> Failure:
    """A failure as the failing process tells it.

    Pipeline stages wrap whatever a model raises in a bare ``RuntimeError``, which says less than its
    cause; the cause is named then, and the traceback shows both.
    """
    telling = exception
    while type(telling) is RuntimeError and telling.__cause__ is not None:
        telling = telling.__cause__
    try:
        message = str(telling)
    except Exception as error:  # anything: it is the code of whoever wrote the exception's class
        message = f"(no message: the exception's own __str__ raised {type(error).__name__})"
    return Failure(
        rank=rank,
        type=type(telling).__name__,
        message=message,
        traceback="".join(traceback.format_exception(exception)),
        time=time.time(),
        host=socket.gethostname(),
    )


def describe_exit(rank: int, exit_code: int) -> Failure:
    """A failure as the parent sees it: the rank is gone with this exit status (``-n``: signal ``n``)."""
    if exit_code < 0:
        name = _signal_name(-exit_code)
        kind, message = name, _signal_message(name)
    else:
        kind, message = "ExitStatus", f"ended with exit status {exit_code} and without a report"
    return Failure(rank, kind, message, "", time.time(), socket.gethostname(), exit_code)


def of_launcher(kind: str, message: str) -> Failure:
    """A failure of what was to start the ranks, in words of its own."""
    return Failure(-1, kind, message, "", time.time(), socket.gethostname())


def stuck(rank: int, message: str, stacks: str) -> Failure:
    """A failure that the rank cannot tell itself, because it does not get on."""
    return Failure(rank, "TimeoutError", message, stacks, time.time(), socket.gethostname())


def write_failure(directory: Path, failure: Failure) -> None:
    """Leave a report in the run's directory. A rank's first one stands: the next is a consequence of it."""
    folder = directory / "failures"
    folder.mkdir(exist_ok=True)
    path = folder / f"rank-{failure.rank}.json"
    if not path.exists():
        write_json(path, asdict(failure))


def forget_failures(directory: Path) -> None:
    """Remove the reports of an earlier start of the run."""
    shutil.rmtree(directory / "failures", ignore_errors=True)


def read_failures(directory: Path) -> list[Failure]:
    """The reports of the run in ``directory``, in the order of time."""
    reports = (directory / "failures").glob("rank-*.json")
    return sorted((Failure(**json.loads(path.read_text())) for path in reports), key=lambda f: f.time)


def root_cause(failures: Sequence[Failure], world_size: int) -> Failure:
    """The failure that the others follow from.

    In this order: the earliest that is not a consequence in itself, such as an exception of the model or a
    kill by the kernel; a rank that left no report while its peers lost their connection; the earliest of all.

    Args:
        failures: Reports of the ranks and what their parent saw, at least one.
        world_size: Ranks of the run.

    Returns:
        One of ``failures``, or one that names the silent rank and quotes its peer.
    """
    own_reports = _first_of_each_rank(failures)
    independent = [failure for failure in own_reports if not _is_consequence(failure)]
    if independent:
        return min(independent, key=lambda f: f.time)
    first = min(own_reports, key=lambda f: f.time)
    silent = sorted(set(range(world_size)) - {failure.rank for failure in own_reports})
    if silent and _is_communication(first):
        return _silence(silent, first)
    return first


def status_of(failure: Failure) -> str:
    """The ``status`` of a run that ended so: ``oom``, ``diverged``, ``timeout``, ``preempted`` or ``failed``.

    A rank that SIGKILL ended is ``failed``: the kernel's out-of-memory killer is one of several who send it.
    """
    if _is_out_of_memory(failure):
        return "oom"
    if failure.type == "FloatingPointError":
        return "diverged"
    if failure.type in _STOPPED:
        return "preempted"
    if failure.type == "TimeoutError" or (_is_communication(failure) and _mentions(failure, _TIMEOUT_TEXTS)):
        return "timeout"
    return "failed"


def _first_of_each_rank(failures: Iterable[Failure]) -> list[Failure]:
    """What a rank says of itself, else what its parent saw; the earliest where there are several."""
    first: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda f: (f.exit_code is not None, f.time)):
        first.setdefault(failure.rank, failure)
    return list(first.values())


def _is_consequence(failure: Failure) -> bool:
    """Whether it may follow from another rank's failure: a lost peer, or the launcher's own SIGTERM."""
    return failure.type in _STOPPED or _is_communication(failure)


def _is_communication(failure: Failure) -> bool:
    if _is_out_of_memory(failure):  # NCCL reports a lack of device memory as an error of its own
        return False
    return failure.type in _COMMUNICATION_TYPES or _mentions(failure, _COMMUNICATION_TEXTS)


def _is_out_of_memory(failure: Failure) -> bool:
    return failure.type in {"OutOfMemoryError", "MemoryError"} or _mentions(failure, _OUT_OF_MEMORY_TEXTS)


def _mentions(failure: Failure, texts: Iterable[str]) -> bool:
    message = failure.message.lower()
    return any(text in message for text in texts)


def _silence(silent: Sequence[int], witness: Failure) -> Failure:
    ranks = "rank " + str(silent[0]) if len(silent) == 1 else "ranks " + ", ".join(map(str, silent))
    return Failure(
        rank=silent[0],
        type="Silent",
        message=f"{ranks} left no report; rank {witness.rank} then saw: {witness.message}",
        traceback=witness.traceback,
        time=witness.time,
        host=witness.host,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal_message(name: str) -> str:
    remarks = {
        "SIGKILL": "killed by SIGKILL (the kernel's out-of-memory killer sends this too)",
        "SIGSEGV": "killed by SIGSEGV (an invalid memory access in native code)",
        "SIGABRT": "killed by SIGABRT (native code gave up; NCCL's watchdog does so when a collective hangs)",
        "SIGBUS": "killed by SIGBUS (often a full /dev/shm)",
    }
    return remarks.get(name, f"stopped by {name}" if name in _STOP_SIGNALS else f"killed by {name}")
