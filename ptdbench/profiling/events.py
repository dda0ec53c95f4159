"""Events of a trace of torch's profiler: of the host, of devices, and operations of communication.

torch writes each operation that it hands to NCCL on the host, as ``record_param_comms``, and repeats its facts at the
kernel that carries it out. Of messages that are sent together it cannot: one kernel carries out all of them, and starts
when their group ends: up to torch 2.14 under ``nccl:coalesced``, and each of them is a ``record_param_comms`` before;
from 2.15 on under a ``record_param_comms`` of its own, ``batch_op_issue``. That version tells with whom only where the
message was asked for, in a ``c10d::send`` or ``c10d::recv_`` before, also of a message of its own.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ptdbench.measure.memory import no_collection

#: A stretch of time; a set of moments is a sorted list of disjoint ones.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of them; they may overlap and come in any order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments in both of two sets."""
    found = []
    mine, theirs = 0, 0
    while mine < len(some) and theirs < len(others):
        start = max(some[mine][0], others[theirs][0])
        end = min(some[mine][1], others[theirs][1])
        if end > start:
            found.append((start, end))
        if some[mine][1] < others[theirs][1]:
            mine += 1
        else:
            theirs += 1
    return found


def subtract(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments of one set that are not in the other."""
    ends = (float("-inf"), float("inf"))
    edges = [ends[0], *(edge for interval in others for edge in interval), ends[1]]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return intersect(some, gaps)


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


T = TypeVar("T")


def at(moment: float, spans: Sequence[tuple[Interval, T]]) -> T | None:
    """What belongs to that of sorted intervals in which the moment lies."""
    place = bisect_right(spans, moment, key=lambda span: span[0][0]) - 1
    return spans[place][1] if place >= 0 and moment < spans[place][0][1] else None


#: Operations, a longer name before one that it begins with. torch decorates them: ``_allgather_base_``.
_OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv", "send", "recv", "barrier",
    "reduce", "gather", "scatter",
)  # fmt: skip

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
    """One operation of communication on this rank."""

    #: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``dispatch``, ``combine``, ``broadcast``,
    #: ``send``, ...
    operation: str
    bytes: int  #: Size of its largest tensor.
    start: float  #: When it was called, in seconds since the epoch.
    end: float  #: When it was done.
    within: tuple[str, ...] = ()  #: Names of what called it, the innermost last.
    peer: int | None = None  #: The other rank of a message, by its number in the group.
    ranks: tuple[int, ...] | None = None  #: The ranks that take part, where the trace says so.
    group: str | None = None  #: The name of their group, where the trace says so.
    #: When the rank called it and, last, when it awaited it; only of a message of gloo, whose end is noted when it is
    #: awaited, however long it has been done.
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
    with no_collection():
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
    return next((known for known in _OPERATIONS if joined.startswith(known.replace("_", ""))), plain)


def sizes(event: Event) -> set[int]:
    """Return the numbers of elements of the tensors of an operation; lists of tensors count as one, too."""
    found = set()
    for argument, dtype in zip_longest(event.facts.get("Input Dims", []), event.facts.get("Input type", [])):
        nested = bool(argument) and isinstance(argument[0], list)
        is_single = not argument and item_bytes(dtype or "") is not None  # a tensor of one number, and no option
        several = [math.prod(shape) for shape in (argument if nested else [argument]) if shape or nested or is_single]
        found |= {*several, sum(several)} if several else set()
    return found or {0}


def item_bytes(name: str) -> int | None:
    """Return the size of an element by torch's name of its type, such as ``c10::BFloat16``; ``None`` of other words."""
    return BYTES.get(name.lower().removeprefix("c10::").removesuffix(" int"))


def peer(event: Event) -> int | None:
    """Return the other rank of ``c10d::send(tensors, group, rank, tag)``."""
    if operation_of(event.name) not in POINT_TO_POINT:
        return None
    inputs = event.facts.get("Concrete Inputs", [])
    return int(inputs[2]) if len(inputs) > 2 and str(inputs[2]).isdecimal() else None


#: Bytes of a GPU that the buffers of a communicator take, an estimate: ``NCCL_BUFFSIZE`` is 4 MiB by NCCL's
#: documentation, for each neighbor and channel; a ring has two neighbors, and up to 32 channels over NVLink.
NCCL_BUFFERS = 2 * 32 * (4 << 20)

_NCCL_NAME = "Collective name"
_RECORDED, _TOGETHER = "record_param_comms", "nccl:coalesced"

#: Where torch says up to 2.14 with whom a message is exchanged, and of which operation that is said.
_PEERS = {"Dst Rank": "send", "Src Rank": "recv"}

#: What 2.15 records without that, and where it was asked for with it; under which name that is kept here.
_UNDIRECTED, _ASKED, _PEER = ("batch_op_issue", "send", "recv"), ("c10d::send", "c10d::recv_"), "peer"


def is_of_nccl(event: Event) -> bool:
    """Return whether an event is a kernel of NCCL's."""
    return event.name.startswith("nccl")


def calls_of_nccl(events: Sequence[Event], kernels: Iterable[Event]) -> list[Call]:
    """The operations that kernels of NCCL carry out; one that carries out several messages has each of them.

    The events are all of a trace, in the order of their start.
    """
    launches, groups = launches_of(events), list(_nccl_groups(events))
    labels = [(one.interval, one.name) for one in events if one.name in LABELED and one.kind == "user_annotation"]
    found = []
    for kernel in kernels:
        moment = launches.get(kernel.facts.get("correlation"), -math.inf)
        says_all = _NCCL_NAME in kernel.facts and not _is_undirected(kernel.facts)
        messages = None if says_all else at(moment, groups)
        found += [_nccl_call(kernel, facts, at(moment, labels)) for facts in messages or [kernel.facts]]
    return found


def _nccl_groups(events: Sequence[Event]) -> Iterator[tuple[Interval, list[Mapping[str, Any]]]]:
    """When the host launches kernels of messages, and the facts of these, from before in its thread.

    Up to torch 2.14 a message of its own has its kernel under it, and an annotation such as ``nccl:send 0->1``.
    """
    pending: defaultdict[Any, list[Event]] = defaultdict(list)
    asked: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        own = pending[event.thread]
        if event.name in _ASKED:
            asked[event.thread].append(event)
        elif event.name == _RECORDED and event.facts.get(_NCCL_NAME) != "wait":
            if _is_undirected(event.facts):
                yield event.interval, [_directed(event, message) for message in asked[event.thread]]
            else:
                own.append(event)
            asked[event.thread].clear()
        elif event.name == _TOGETHER and event.kind == "user_annotation":
            yield event.interval, [one.facts for one in own]
            own.clear()
        elif event.name.startswith("nccl:") and own and event.end <= own[-1].end:
            own.pop()


def _is_undirected(facts: Mapping[str, Any]) -> bool:
    """Whether these are the facts of messages, and do not say with whom."""
    return facts.get(_NCCL_NAME) in _UNDIRECTED and not _PEERS.keys() & facts.keys()


def _directed(recorded: Event, message: Event) -> Mapping[str, Any]:
    """The facts of a message, of which torch 2.15 records the type and the group: ``c10d::send(tensors, group, rank)``.

    Its rank is one of the group.
    """
    operation, size = operation_of(message.name), max(sizes(message))
    return {**recorded.facts, _NCCL_NAME: operation, "In msg nelems": size, "Out msg nelems": 0, _PEER: peer(message)}


def _nccl_call(kernel: Event, facts: Mapping[str, Any], label: str | None) -> Call:
    """The operation of these facts, carried out by a kernel that was launched under a label."""
    elements = max(int(facts.get("In msg nelems", 0)), int(facts.get("Out msg nelems", 0)))
    item = BYTES.get(str(facts.get("dtype", "")).lower(), 1)
    named = str(facts.get(_NCCL_NAME) or re.sub(r"ncclDevKernel_|nccl(Dev)?Kernel_?", "", kernel.name))
    listed = str(facts.get("Process Group Ranks", ""))
    ranks = tuple(map(int, re.findall(r"\d+", listed))) if "..." not in listed else ()
    operation = operation_of(named.lstrip("_"))
    other = next((int(facts[name]) for name, of in _PEERS.items() if of == operation and name in facts), None)
    return Call(
        operation=LABELED[label] if label else operation,
        bytes=elements * item,
        start=kernel.start,
        end=kernel.end,
        peer=facts.get(_PEER, ranks.index(other) if other in ranks else None),
        ranks=ranks or None,
        group=facts.get("Process Group Name"),
    )
