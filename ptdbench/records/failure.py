"""Failure reports of ranks, written by the rank itself or by others, and the root cause of a failed run.

When one rank dies, its peers fail within milliseconds because their connection is lost, and the launcher ends the
rest. Every rank therefore writes its own report, and :func:`root_cause` selects the error of the run from all of them.
"""

import json
import signal
import socket
import sysconfig
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ptdbench.files import replace_bytes, write_json
from ptdbench.launch.local import STOP_SIGNALS
from ptdbench.problems import message_of
from ptdbench.records.schema import Error

_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = _PACKAGE / "examples"
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
_LIBRARY = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def user_frame(exception: BaseException) -> str:
    """Return the last frame of the traceback in user code: ``mymodels.py:13 in forward``; empty if there is none.

    User code is code outside this package, Python's library and the installed packages; failing that, as with a model
    from a package, the last frame in an installed package other than torch.
    """
    frames = [*reversed(traceback.extract_tb(exception.__traceback__))]
    for is_wanted in (_is_of_user, _is_of_package):
        for frame in frames:
            path, folder = Path(frame.filename), Path.cwd()
            if path.is_absolute() and is_wanted(path):
                shown = path.relative_to(folder) if folder in path.parents else path.name
                return f"{shown}:{frame.lineno} in {frame.name}"
    return ""


def _is_of_user(path: Path) -> bool:
    return _EXAMPLES in path.parents or not {_PACKAGE, *_INSTALLED, *_LIBRARY}.intersection(path.parents)


def _is_of_package(path: Path) -> bool:
    if _PACKAGE in path.parents:
        return False
    return any(site in path.parents and path.relative_to(site).parts[0] != "torch" for site in _INSTALLED)


#: Characters of a message and of a traceback that are kept; third-party ones may have millions.
_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 20_000, 200_000

#: The traceback of the exception that made a run fail, in its directory.
TRACEBACK = "traceback.txt"


@dataclass(frozen=True)
class Failure:
    """The failure of one rank."""

    rank: int  #: The rank; -1 for the process that starts the ranks.
    type: str  #: The exception's class, or the signal's name.
    message: str  #: The error message to show.
    traceback: str = ""  #: The traceback as text; empty if the process could not write one.
    time: float = field(default_factory=time.time)  #: Seconds since the epoch, by the clock of ``host``.
    host: str = field(default_factory=socket.gethostname)  #: The machine it ran on; empty if unknown.
    #: Exit status seen by the parent, ``-n`` after signal ``n``; ``None`` in the rank's own report.
    exit_code: int | None = None
    #: For a rank stopped by a signal: the ranks not known to be stopped. If one of them reports something later, it was
    #: alive, and the signal was not sent to all.
    unheard: list[int] = field(default_factory=list)
    #: The last frame in the user's code, such as ``mymodels.py:13 in forward``; else empty.
    where: str = ""

    def as_error(self) -> dict[str, object]:
        """Return the ``error`` of a record."""
        return {name: getattr(self, name) for name in Error.__struct_fields__}


def describe(exception: BaseException, rank: int) -> Failure:
    """Report the failure of this process itself.

    Pipeline stages wrap an exception of the model in a bare ``RuntimeError``, which is less informative than its cause;
    then the cause is reported, and the traceback shows both.
    """
    cause = exception
    while type(cause) is RuntimeError and cause.__cause__ is not None:
        cause = cause.__cause__
    return Failure(
        rank=rank,
        type=type(cause).__name__,
        message=_shortened(message_of(cause), _LONGEST_MESSAGE),
        traceback=_shortened("".join(traceback.format_exception(exception)), _LONGEST_TRACEBACK),
        where=user_frame(cause) or user_frame(exception),
    )


def _shortened(text: str, most: int) -> str:
    """Return at most ``most`` characters of the text: the middle is cut out, as the end often states the remedy."""
    left_out = len(text) - most
    half = most // 2
    return text if left_out <= 0 else f"{text[:half]} ... ({left_out:,} characters left out) ... {text[-half:]}"


#: What signals that end a rank mean.
_SIGNALS = {
    "SIGKILL": "killed by SIGKILL (the kernel's out-of-memory killer sends this too)",
    "SIGSEGV": "killed by SIGSEGV (an invalid memory access in native code)",
    "SIGABRT": "killed by SIGABRT (native code gave up; NCCL's watchdog does so when a collective hangs, gloo when "
    "ranks send different sizes)",
    "SIGBUS": "killed by SIGBUS (often a full /dev/shm)",
    **{name: f"stopped by {name}" for name in STOP_SIGNALS},
}


def describe_exits(exit_codes: Mapping[int, int], world_size: int, oom_kills: int = 0) -> list[Failure]:
    """Report, as their parent, the ranks that exited before the parent signaled any.

    ``exit_codes`` is by rank, ``-n`` after signal ``n``. A rank that exited early with status 0 is not reported: its
    peers report a lost connection. ``oom_kills`` is the number of processes that the kernel has killed for lack of
    memory since the ranks were started.
    """
    failures = []
    for rank, code in exit_codes.items():
        names = (number.name for number in signal.Signals if number == -code)
        kind = "ExitStatus" if code > 0 else next(names, f"signal {-code}")
        message = _SIGNALS.get(kind, f"killed by {kind}")
        if code > 0:
            message = f"ended with exit status {code} and without a report"
        elif kind == "SIGKILL" and oom_kills:
            message = "killed by SIGKILL: the kernel ran out of memory meanwhile"
        alive = [other for other in range(world_size) if exit_codes.get(other) != code]
        if code:
            unheard = alive if kind in STOP_SIGNALS else []
            failures.append(Failure(rank, kind, message, exit_code=code, unheard=unheard))
    return failures


def write_failure(folder: Path, failure: Failure) -> Failure:
    """Write a report unless the rank has one; returns the rank's first report, as later ones are its consequences."""
    folder.mkdir(parents=True, exist_ok=True)
    if _report(folder, failure.rank).exists():
        return _read(_report(folder, failure.rank))
    amend_failure(folder, failure)
    return failure


def write_traceback(directory: Path, failure: Failure) -> None:
    """Write the traceback of an exception in user code into the run's directory for the user."""
    if failure.where:
        with suppress(OSError):
            replace_bytes(directory / TRACEBACK, failure.traceback.encode(errors="backslashreplace"))


def amend_failure(folder: Path, failure: Failure) -> None:
    """Replace the report of a rank."""
    write_json(_report(folder, failure.rank), asdict(failure))


def read_failures(folder: Path) -> list[Failure]:
    """Return the reports in a folder, by time."""
    return sorted(map(_read, folder.glob("rank-*.json")), key=lambda failure: failure.time)


def reporters(folder: Path) -> set[int]:
    """Return the ranks with a report in a folder."""
    return {int(path.stem.rpartition("-")[2]) for path in folder.glob("rank-*.json")}


def _read(path: Path) -> Failure:
    return Failure(**json.loads(path.read_text()))


def _report(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


_COMMUNICATION_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TIMEOUT_TEXTS = ("timed out waiting", "timed out after", "wait timeout", "operation timeout", "application timeout")
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

#: Libraries that report a lack of GPU memory other than by torch's own exception, in lower case.
_OF_GPU = ("cuda", "cublas", "cudnn", "nccl")


def root_cause(failures: Sequence[Failure], world_size: int) -> Failure:
    """Return the failure that caused the others; ``failures`` are those of the ranks and their parent, at least one.

    In order of precedence:

    1. the earliest that is not a consequence of another, such as an exception of the model or a kill by the kernel;
    2. a rank that was ended by a signal that the others did not receive, as its parent reports;
    3. a rank without a report whose peers lost their connection, or were stopped because it was gone;
    4. a rank that was stopped by a signal while others still worked, as their later reports show;
    5. the earliest of all: a signal stopped all ranks, and none is the cause.

    Returns one of ``failures``, possibly with details added, or a new one that names the silent rank and quotes its
    peer.
    """
    first: dict[int, Failure] = {}  # each rank's own report, else its parent's; the earliest of several
    for failure in sorted(failures, key=lambda failure: (failure.exit_code is not None, failure.time)):
        first.setdefault(failure.rank, failure)
    reports = sorted(first.values(), key=lambda failure: failure.time)
    reported = {failure.rank for failure in reports}
    silent = sorted(set(range(world_size)) - reported)
    for failure in reports:
        if not (is_stop(failure) or _is_communication(failure)):  # a lost peer, or the launcher's own SIGTERM
            return failure
    for failure in reports:
        if failure.exit_code is not None and failure.unheard:
            return _singled_out(failure)
    for failure in reports:
        # The first to lose a connection may have lost it to a silent rank; a stopped rank knows its missing peers.
        missed = silent if failure is reports[0] and _is_communication(failure) else set(silent) & set(failure.unheard)
        if missed:
            return _silence(sorted(missed), failure)
    for failure in reports:
        if reported & set(failure.unheard):
            return _singled_out(failure)
    return reports[0]


def status_of(failure: Failure) -> str:
    """Return the ``status`` of a run with this failure.

    A rank killed by SIGKILL is ``failed``: the kernel's out-of-memory killer is only one possible sender. So is a rank
    that alone was stopped by a signal: preemption stops all ranks.
    """
    if _is_out_of_memory(failure):
        return "oom"
    if failure.type == "FloatingPointError":
        return "diverged"
    if is_stop(failure):
        return "failed" if failure.unheard else "preempted"
    if failure.type == "TimeoutError" or (_is_communication(failure) and _mentions(failure, _TIMEOUT_TEXTS)):
        return "timeout"
    return "failed"


def is_of_gpu(error: Error) -> bool:
    """Return whether a run was out of GPU memory rather than host memory."""
    return error.type == "OutOfMemoryError" or any(name in error.message.lower() for name in _OF_GPU)


def is_stop(failure: Failure) -> bool:
    """Return whether a signal asked the rank to stop, so that the rank itself did not fail."""
    return failure.type in {*STOP_SIGNALS, "Stopped", "SignalException", "KeyboardInterrupt"}


def _is_communication(failure: Failure) -> bool:
    if _is_out_of_memory(failure):  # NCCL reports a lack of device memory as an NCCL error
        return False
    return failure.type in _COMMUNICATION_TYPES or _mentions(failure, _COMMUNICATION_TEXTS)


def _is_out_of_memory(failure: Failure) -> bool:
    return failure.type in {"OutOfMemoryError", "MemoryError"} or _mentions(failure, _OUT_OF_MEMORY_TEXTS)


def _mentions(failure: Failure, texts: Iterable[str]) -> bool:
    message = failure.message.lower()
    return any(text in message for text in texts)


def _singled_out(failure: Failure) -> Failure:
    return replace(failure, message=f"rank {failure.rank} was {failure.message}, which its peers did not receive")


def _silence(silent: Sequence[int], witness: Failure) -> Failure:
    ranks = "rank " + str(silent[0]) if len(silent) == 1 else "ranks " + ", ".join(map(str, silent))
    message = f"{ranks} left no report; rank {witness.rank} then saw: {witness.message}"
    return Failure(silent[0], "Silent", message, witness.traceback, witness.time, witness.host)
