"""Events of a trace of torch's profiler: of the host, of devices and their kinds, and communication operations.

torch records each operation that it passes to NCCL on the host, as ``record_param_comms``, and repeats its metadata at
the kernel that runs it. Coalesced messages are run by one kernel without metadata, launched when their group ends: up
to torch 2.14 under ``nccl:coalesced``, after a ``record_param_comms`` for each message; from 2.15 on under a single
``record_param_comms``, ``batch_op_issue``. Version 2.15 names the peer only in a preceding ``c10d::send`` or
``c10d::recv_``, even for single messages.
"""

import json
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ptdbench.measure.memory import no_collection

#: An interval of time; a set of times is a sorted list of disjoint intervals.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, which may overlap and be in any order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        elif end > start:
            disjoint.append((start, end))
    return disjoint


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two sets of times."""
    common = []
    i, j = 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if end > start:
            common.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times of one set that are not in the other."""
    edges = [-math.inf, *chain.from_iterable(others), math.inf]
    return intersect(some, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


T = TypeVar("T")


def value_at(moment: float, spans: Sequence[tuple[Interval, T]]) -> T | None:
    """Return the value of the sorted interval that contains the moment, if any."""
    place = bisect_right(spans, moment, key=lambda span: span[0][0]) - 1
    return spans[place][1] if place >= 0 and moment < spans[place][0][1] else None


#: Operations; longer names come before their prefixes. torch decorates them: ``_allgather_base_``.
_OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv", "send", "recv", "barrier",
    "reduce", "gather", "scatter",
)  # fmt: skip

#: Labels in a trace of the ``all_to_all`` calls that send tokens to the ranks of their experts and back, in both
#: passes; they are reported as separate operations.
DISPATCH, COMBINE = "ptdbench::dispatch", "ptdbench::combine"
LABELED = {DISPATCH: "dispatch", COMBINE: "combine"}

#: Bytes per element, by torch's type names.
BYTES = {"double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "char": 1, "bool": 1}

#: Messages between two ranks.
POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class CommCall:
    """One communication operation on this rank."""

    operation: str  #: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``dispatch``, ``combine``, ``send``, ...
    bytes: int  #: Size of its largest tensor.
    start: float  #: When it was called, in seconds since the epoch.
    end: float  #: When it ended.
    within: tuple[str, ...] = ()  #: Names of the enclosing events, the innermost last.
    peer: int | None = None  #: The other rank of a message, by its number in the group.
    ranks: tuple[int, ...] | None = None  #: The participating ranks, if the trace names them.
    group: str | None = None  #: The name of their group, if the trace names it.
    #: The intervals in which the rank called it and, last, awaited it; only for a gloo message, whose end is recorded
    #: when it is awaited, even if it ended long before.
    held: tuple[Interval, ...] | None = None

    @property
    def awaited(self) -> float:
        """When the rank began to await a gloo message; infinite if it did not."""
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
        """The interval from start to end."""
        return self.start, self.end


def events_of(path: Path) -> list[Event]:
    """Return the events of a trace that have a duration, ordered by start."""
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
    """Return the start of each CUDA call of the host, by correlation id."""
    return {
        event.facts["correlation"]: event.start
        for event in events
        if event.kind in ("cuda_runtime", "cuda_driver") and "correlation" in event.facts
    }


#: Kinds of GPU kernels by regular expressions of their names; the first match counts, ``other`` if none does.
KERNEL_KINDS = {
    "communication": r"^nccl",
    "compiled": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa",
    "convolution": r"conv(?!ert)|wgrad|dgrad|winograd|im2col|col2im",
    "product": r"gemm|gemv|cublas|cutlass|nvjet|scaled_mm|splitk",
    "optimizer": r"multi_tensor_apply|fused_?(adam|sgd)|fusedoptimizer",
    "norm": r"layer_?norm|rms_?norm|batch_?norm|gammabeta|bn_(fw|bw)|group_?norm",
    "reduction": r"reduce_kernel|softmax|logsumexp|argmax|topk|sort|scan",
    "copy": r"copy|catarray|loadwithcast|memcpy",
    "elementwise": r"elementwise|gelu|silu|dropout",
}


def kernel_kind(name: str) -> str:
    """Classify a kernel by its purpose."""
    return next((kind for kind, has in KERNEL_KINDS.items() if re.search(has, name, re.IGNORECASE)), "other")


def kernels_by_kind(kernels: Mapping[str, int]) -> Counter[str]:
    """Count kernels by kind, given their counts by name."""
    kinds = Counter[str]()
    for name, count in kernels.items():
        kinds[kernel_kind(name)] += count
    return kinds


def operation_of(name: str) -> str:
    """Return the normalized name of an operation, such as ``all_gather`` for ``c10d::_allgather_base_``."""
    plain = re.sub(r"^(c10d::|gloo:|nccl:)_?", "", name).lower()
    joined = plain.replace("_", "")
    return next((name for name in _OPERATIONS if joined.startswith(name.replace("_", ""))), plain)


def sizes(event: Event) -> set[int]:
    """Return the element counts of an operation's tensors, and the total of each list of tensors."""
    counts: set[int] = set()
    for argument, dtype in zip_longest(event.facts.get("Input Dims", []), event.facts.get("Input type", [])):
        nested = bool(argument) and isinstance(argument[0], list)
        is_single = not argument and item_bytes(dtype or "") is not None  # a scalar tensor, not an option
        several = [math.prod(shape) for shape in (argument if nested else [argument]) if shape or nested or is_single]
        counts |= {*several, sum(several)} if several else set()
    return counts or {0}


def item_bytes(name: str) -> int | None:
    """Return the element size of a torch type name, such as ``c10::BFloat16``; ``None`` for other words."""
    return BYTES.get(name.lower().removeprefix("c10::").removesuffix(" int"))


def peer(event: Event) -> int | None:
    """Return the other rank of ``c10d::send(tensors, group, rank, tag)``."""
    if operation_of(event.name) not in POINT_TO_POINT:
        return None
    inputs = event.facts.get("Concrete Inputs", [])
    return int(inputs[2]) if len(inputs) > 2 and str(inputs[2]).isdecimal() else None


def calls_of_gloo(events: Sequence[Event], transfers: Sequence[Event], awaited: Sequence[Interval]) -> list[CommCall]:
    """Match each of gloo's transfers with the operation that started it: the first unmatched one of its size.

    ``events``: of the calling thread; ``awaited``: when it awaited communication.
    """
    open_events: list[Event] = []
    started: list[tuple[Event, tuple[str, ...]]] = []
    by_size: defaultdict[tuple[str, int], deque[int]] = defaultdict(deque)
    for event in events:
        open_events = [other for other in open_events if other.end > event.start]
        if event.name.startswith("c10d::"):
            for size in sizes(event):
                by_size[_kind(event), size].append(len(started))
            started.append((event, tuple(other.name for other in open_events)))
        open_events.append(event)
    calls = []
    taken: set[int] = set()
    for transfer in transfers:
        queues = [by_size[_kind(transfer), size] for size in sizes(transfer)]
        for queue in queues:
            while queue and queue[0] in taken:
                queue.popleft()
        first = min((queue[0] for queue in queues if queue), default=None)
        event, within = transfer, tuple[str, ...]()
        dtype = next(iter(transfer.facts.get("Input type", [])), "")
        if first is not None and started[first][0].start <= transfer.end:
            taken.add(first)
            event, within = started[first]
        place = bisect_right(awaited, (transfer.end, math.inf))
        awaiting = [wait for wait in awaited[max(0, place - 1) : place] if transfer.end <= wait[1]]  # at most one
        calls.append(
            CommCall(
                operation=next((LABELED[name] for name in within if name in LABELED), operation_of(event.name)),
                bytes=max(sizes(event) | sizes(transfer)) * (item_bytes(dtype) or 1),
                start=min(event.start, transfer.start),
                end=transfer.end,
                within=within,
                peer=peer(event),
                held=(event.interval, *awaiting) if _kind(event) else None,
            )
        )
    return sorted(calls, key=lambda call: call.start)


def _kind(event: Event) -> str:
    """Return the operation of a point-to-point message; empty for other communication."""
    operation = operation_of(event.name)
    return operation if operation in POINT_TO_POINT else ""


#: Estimated GPU bytes of a communicator's buffers: ``NCCL_BUFFSIZE``, 4 MiB by default, for each neighbor and channel;
#: a ring has two neighbors, and up to 32 channels over NVLink.
NCCL_BUFFERS = 2 * 32 * (4 << 20)

_NCCL_NAME = "Collective name"
_RECORDED, _TOGETHER = "record_param_comms", "nccl:coalesced"

#: The fields in which torch up to 2.14 names the peer of a message, and their operations.
_PEERS = {"Dst Rank": "send", "Src Rank": "recv"}

#: Operations that 2.15 records without a peer, the calls that name it, and the field that holds it here.
_UNDIRECTED, _REQUESTS, _PEER = ("batch_op_issue", "send", "recv"), ("c10d::send", "c10d::recv_"), "peer"


def is_of_nccl(event: Event) -> bool:
    """Return whether an event is an NCCL kernel."""
    return event.name.startswith("nccl")


def calls_of_nccl(events: Sequence[Event], kernels: Iterable[Event]) -> list[CommCall]:
    """Return the operations of NCCL kernels; a kernel of several messages gives a call for each.

    ``events``: all events of a trace, ordered by start.
    """
    launches, groups = launches_of(events), list(_nccl_groups(events))
    annotations = [event for event in events if event.name in LABELED and event.kind == "user_annotation"]
    labels = [(event.interval, event.name) for event in annotations]
    calls = []
    for kernel in kernels:
        moment = launches.get(kernel.facts.get("correlation"), -math.inf)
        says_all = _NCCL_NAME in kernel.facts and not _is_undirected(kernel.facts)
        messages = None if says_all else value_at(moment, groups)
        calls += [_nccl_call(kernel, facts, value_at(moment, labels)) for facts in messages or [kernel.facts]]
    return calls


def is_by_copy_engines(events: Sequence[Event], calls: Sequence[CommCall]) -> bool:
    """Return whether all-gathers between ranks ran no NCCL kernels, as with ``NCCL_CTA_POLICY=2``."""
    recorded = [event.facts for event in events if event.name == _RECORDED and event.facts.get("Group size", 1) > 1]
    called = {operation_of(str(facts.get(_NCCL_NAME))) for facts in recorded}
    return "all_gather" in called - {call.operation for call in calls}


def _nccl_groups(events: Sequence[Event]) -> Iterator[tuple[Interval, list[Mapping[str, Any]]]]:
    """Yield the intervals in which the host launches kernels of messages, and the metadata recorded before.

    Up to torch 2.14 a single message encloses its kernel, and an annotation such as ``nccl:send 0->1``.
    """
    pending: defaultdict[Any, list[Event]] = defaultdict(list)
    requests: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        recorded = pending[event.thread]
        if event.name in _REQUESTS:
            requests[event.thread].append(event)
        elif event.name == _RECORDED and event.facts.get(_NCCL_NAME) != "wait":
            if _is_undirected(event.facts):
                yield event.interval, [_directed(event, request) for request in requests[event.thread]]
            else:
                recorded.append(event)
            requests[event.thread].clear()
        elif event.name == _TOGETHER and event.kind == "user_annotation":
            yield event.interval, [message.facts for message in recorded]
            recorded.clear()
        elif event.name.startswith("nccl:") and recorded and event.end <= recorded[-1].end:
            recorded.pop()


def _is_undirected(facts: Mapping[str, Any]) -> bool:
    return facts.get(_NCCL_NAME) in _UNDIRECTED and not _PEERS.keys() & facts.keys()


def _directed(recorded: Event, request: Event) -> Mapping[str, Any]:
    """Return a message's metadata from torch 2.15's record and ``c10d::send(tensors, group, rank in the group)``."""
    operation, size = operation_of(request.name), max(sizes(request))
    return {**recorded.facts, _NCCL_NAME: operation, "In msg nelems": size, "Out msg nelems": 0, _PEER: peer(request)}


def _nccl_call(kernel: Event, facts: Mapping[str, Any], label: str | None) -> CommCall:
    """Return the call with these metadata, run by a kernel that was launched under a label."""
    elements = max(int(facts.get("In msg nelems", 0)), int(facts.get("Out msg nelems", 0)))
    item = BYTES.get(str(facts.get("dtype", "")).lower(), 1)
    named = str(facts.get(_NCCL_NAME) or re.sub(r"ncclDevKernel_|nccl(Dev)?Kernel_?", "", kernel.name))
    listed = str(facts.get("Process Group Ranks", ""))
    ranks = tuple(map(int, re.findall(r"\d+", listed))) if "..." not in listed else ()
    operation = operation_of(named.lstrip("_"))
    fields = (name for name, sent in _PEERS.items() if sent == operation and name in facts)
    other = next((int(facts[name]) for name in fields), None)
    return CommCall(
        operation=LABELED[label] if label else operation,
        bytes=elements * item,
        start=kernel.start,
        end=kernel.end,
        peer=facts.get(_PEER, ranks.index(other) if other in ranks else None),
        ranks=ranks or None,
        group=facts.get("Process Group Name"),
    )
