"""Events of a trace of torch's profiler: of the host, of devices, and operations of communication."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ptdbench.profiling.intervals import Interval

T = TypeVar("T")

#: torch's names of operations, without decoration: ``_allgather_base_`` is an ``allgather``.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}

#: What of ``all_to_all`` goes to the ranks that have the experts of tokens and comes back from there, in both passes of
#: a step: labels in a trace, in whose place stand the names of operations of their own.
DISPATCH, COMBINE = "ptdbench::dispatch", "ptdbench::combine"
LABELED = {DISPATCH: "dispatch", COMBINE: "combine"}

#: Bytes of an element, by torch's names of types.
BYTES = {"double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "char": 1, "bool": 1}

#: Larger traces are not read: as objects of Python they take several times as much memory, in each rank of a node.
MOST_BYTES = 2**29

#: Messages between two ranks.
POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class Call:
    """One operation of communication on this rank.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``dispatch``, ``combine``,
            ``broadcast``, ``send``, ...
        bytes: Size of its largest tensor.
        start: When it was called, in seconds since the epoch.
        end: When it was done.
        within: Names of what called it, the innermost last.
        peer: The other rank of a message, by its number in the group.
        ranks: The ranks that take part, where the trace says so.
        group: The name of their group, where the trace says so.
        held: When the rank called it and, last, when it awaited it; only of a message of gloo, whose end is noted when
            it is awaited, however long it has been done.
    """

    operation: str
    bytes: int
    start: float
    end: float
    within: tuple[str, ...] = ()
    peer: int | None = None
    ranks: tuple[int, ...] | None = None
    group: str | None = None
    held: tuple[Interval, ...] | None = None

    @property
    def awaited(self) -> float:
        """When the rank began to await a message of gloo; infinite if it did not."""
        return self.held[1][0] if self.held and len(self.held) > 1 else math.inf

    def holds(self, moment: float) -> bool:
        """Return whether a rank that waits at that moment may wait for this call."""
        return any(start <= moment < end for start, end in self.held or [(self.start, self.end)])


@dataclass(frozen=True)
class Event:
    """An event of a trace; times are in seconds since the epoch."""

    name: str
    kind: str
    start: float
    end: float
    thread: Any
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def interval(self) -> Interval:
        """The interval from its beginning to its end."""
        return self.start, self.end


def checked(path: Path, reading: Callable[[Path], T]) -> T:
    """Read something of a trace.

    Raises:
        ValueError: It is no trace, or too large.
    """
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, and at most {MOST_BYTES} are read; try profile.steps=1")
    try:
        return reading(path)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of torch's profiler ({type(error).__name__}: {error})") from None


def events_of(path: Path) -> list[Event]:
    """The events of a trace that have a duration, in the order of their start."""
    written = json.loads(path.read_bytes(), strict=False)
    base = written.get("baseTimeNanoseconds", 0) / 1e9
    events = [
        Event(
            event["name"],
            event.get("cat", ""),
            base + event["ts"] / 1e6,
            base + (event["ts"] + event["dur"]) / 1e6,
            event["tid"],
            event.get("args", {}),
        )
        for event in written["traceEvents"]
        if event.get("ph") == "X"
    ]
    return sorted(events, key=lambda event: (event.start, -event.end))


def launches_of(events: Sequence[Event]) -> dict[Any, float]:
    """Return when the host made each call of CUDA, by its correlation."""
    return {
        event.facts["correlation"]: event.start
        for event in events
        if event.kind in ("cuda_runtime", "cuda_driver") and "correlation" in event.facts
    }


def operation_of(name: str) -> str:
    """Return what an operation is called here, such as ``all_gather`` for ``c10d::_allgather_base_``."""
    plain = re.sub(r"^(c10d::|gloo:|nccl:)_?", "", name).lower()
    joined = plain.replace("_", "")
    return next((known for begins, known in _OPERATIONS.items() if joined.startswith(begins)), plain)
