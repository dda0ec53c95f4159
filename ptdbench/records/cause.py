"""The root cause of a failed run, selected from the reports of all ranks, and the status that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ptdbench.launch.local import STOP_SIGNALS
from ptdbench.records.failure import Failure

_STOPPED = {*STOP_SIGNALS, "Stopped", "SignalException", "KeyboardInterrupt"}

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


def root_cause(failures: Sequence[Failure], world_size: int) -> Failure:
    """Return the failure that caused the others, of at least one: of the ranks, and of their parent.

    In order of precedence:

    1. the earliest that is not a consequence of another, such as an exception of the model or a kill by the kernel;
    2. a rank that ended by a signal that the others did not receive, as its parent reports;
    3. a rank without a report whose peers lost their connection, or were stopped because it was gone;
    4. a rank that was stopped by a signal while others still worked, as their later reports show;
    5. the earliest of all: a signal stopped all ranks, and none is the cause.

    It is one of ``failures``, possibly with details added, or a new one that names the silent rank and quotes its peer.
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

    A rank killed by SIGKILL is ``failed``: the kernel's out-of-memory killer is only one of its senders. So is a rank
    stopped by a signal of its own: preemption stops all ranks.
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


def is_stop(failure: Failure) -> bool:
    """Return whether a signal asked the rank to end, which is not a failure of its own."""
    return failure.type in _STOPPED


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
    return Failure(
        rank=silent[0],
        type="Silent",
        message=f"{ranks} left no report; rank {witness.rank} then saw: {witness.message}",
        traceback=witness.traceback,
        time=witness.time,
        host=witness.host,
    )
