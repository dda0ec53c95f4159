"""What one rank did in profiled steps, read from the trace that torch's profiler wrote.

On a CPU the thread that runs the steps computes, except while it waits for communication, which goes on in threads of
its own (``gloo:*``). It waits where it says so (:data:`WAITING`), in operations that start or await communication, and
in C++ where DDP awaits its last bucket: there, between a backward pass and what follows, lies the end of an all-reduce.

On a GPU kernels compute and NCCL's kernels communicate. A moment without a kernel counts for the phase of the next
kernel: the device waited for it to be launched.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ptdbench.measure.intervals import Interval, intersect, subtract, union

T = TypeVar("T")

#: How the label of a step begins, before its number: as torch's own profiler marks steps, which other tools know.
STEP = "ProfilerStep#"

#: The other labels in a trace: the parts of a step, and waiting for communication.
DATA, GRADIENTS, UPDATE, WAITING = (f"ptdbench::{name}" for name in ("data", "gradients", "update", "waiting"))

#: What a backward pass is in, by the beginnings of names.
BACKWARD = ("autograd::engine::evaluate_function", "torch::distributed::reducer", "torch.distributed.ddp.reducer")
#: FSDP's root reduces what gradients are left after the last operation of autograd.
_ROOT_ENDS = "FSDP::root_post_backward"

#: Kinds of events of the host.
_ON_HOST = ("user_annotation", "cpu_op")

_AWAIT = "_c10d_functional::wait_tensor"

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

_BYTES = {"double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "char": 1, "bool": 1}

#: Larger traces are not read: as objects of Python they take several times as much memory, in each rank of a node.
MOST_BYTES = 2**29

#: Messages between two ranks.
POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class Call:
    """One operation of communication on this rank.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send``, ...
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
        """Whether a rank that waits at that moment may wait for this call."""
        return any(start <= moment < end for start, end in self.held or [(self.start, self.end)])


@dataclass(frozen=True)
class Trace:
    """One rank's profiled steps; all times are in seconds since the epoch.

    Attributes:
        steps: When each step ran.
        phases: When ``data``, ``forward``, ``backward`` and ``optimizer`` ran: disjoint, and without the waits.
        waits: When the rank computed nothing because it waited for communication; disjoint, and inside of the steps.
        calls: The operations of communication, in the order of their start; also those outside of the steps.
    """

    steps: Sequence[Interval]
    phases: Mapping[str, Sequence[Interval]]
    waits: Sequence[Interval]
    calls: Sequence[Call]


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
        """When it began and ended."""
        return self.start, self.end


def read(path: Path, device_type: str = "cpu") -> Trace:
    """Read a trace in Chrome's format.

    Args:
        path: The trace.
        device_type: What computed: ``cpu`` or ``cuda``.

    Raises:
        ValueError: It is damaged or too large, holds no profiled step, or does not show what a GPU did.
    """
    return _checked(path, lambda trace: _read(trace, device_type))


def _checked(path: Path, reading: Callable[[Path], T]) -> T:
    """What is read of a trace, if it is one and not too large; raises ValueError."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, and at most {MOST_BYTES} are read; try profile.steps=1")
    try:
        return reading(path)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of torch's profiler ({type(error).__name__}: {error})") from None


def _read(path: Path, device_type: str) -> Trace:
    events = _events(path)
    steps = [event for event in events if event.name.startswith(STEP) and event.kind == "user_annotation"]
    if not steps:
        raise ValueError(f"{path} holds no profiled step")
    on_device = [event for event in events if event.kind in ("kernel", "gpu_memcpy", "gpu_memset")]
    own = [event for event in events if event.thread == steps[0].thread and event.kind in _ON_HOST]
    parts = {name: [event.interval for event in own if event.name == name] for name in (DATA, GRADIENTS, UPDATE)}
    whole = [step.interval for step in steps]
    by_gloo = [event for event in events if event.name.startswith("gloo:")]
    if device_type == "cpu":
        return _of_host(whole, parts, own, by_gloo)
    if not on_device:
        raise ValueError(f"{path} holds no kernels: the profiler could not watch the GPU")
    if by_gloo:
        raise ValueError(f"{path} does not show when a GPU waits for gloo; try backend=nccl")
    return _of_device(whole, parts, events, on_device)


def launched_in_steps(path: Path) -> list[Event]:
    """The kernels that the host launched in profiled steps, whenever the device came to them.

    Raises:
        ValueError: As :func:`read`.
    """
    events = _checked(path, _events)
    launches = _launches(events)
    steps = union(event.interval for event in events if event.name.startswith(STEP))
    kernels = [event for event in events if event.kind == "kernel"]
    if not steps or not kernels:
        raise ValueError(f"{path} holds {'no kernels' if steps else 'no profiled step'}")
    moments = [launches.get(event.facts.get("correlation"), event.start) for event in kernels]
    return [
        event
        for event, moment in zip(kernels, moments, strict=True)
        if any(begin <= moment < end for begin, end in steps)
    ]


def _events(path: Path) -> list[Event]:
    """Those of a trace with a duration, in the order of their start."""
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


def _launches(events: Sequence[Event]) -> dict[Any, float]:
    """When the host made each call of CUDA, by its correlation."""
    return {
        event.facts["correlation"]: event.start
        for event in events
        if event.kind in ("cuda_runtime", "cuda_driver") and "correlation" in event.facts
    }


def _of_host(
    steps: Sequence[Interval], parts: Mapping[str, Sequence[Interval]], own: Sequence[Event], sent: Sequence[Event]
) -> Trace:
    operations = [event for event in own if event.kind == "cpu_op"]
    calls = _calls(own, sent)
    top = list(_outermost(operations))
    waits = [event.interval for event in own if event.name in (WAITING, _AWAIT) or event.name.startswith("c10d::")]
    waits = union([*waits, *intersect(list(_silent_waits(top, calls)), parts[GRADIENTS])])
    backward = intersect(_backward(top), parts[GRADIENTS])
    phases = {
        "data": parts[DATA],
        "forward": subtract(parts[GRADIENTS], backward),
        "backward": backward,
        "optimizer": parts[UPDATE],
    }
    return _trace(steps, phases, waits, calls)


def _trace(
    steps: Sequence[Interval], phases: Mapping[str, Sequence[Interval]], waits: Sequence[Interval], calls: list[Call]
) -> Trace:
    """The trace, with everything but the calls cut to its steps."""
    inside = union(steps)
    waits = intersect(waits, inside)
    cut = {name: intersect(subtract(union(times), waits), inside) for name, times in phases.items()}
    return Trace(steps, cut, waits, calls)


def _outermost(events: Sequence[Event]) -> Iterator[Event]:
    """Those of sorted events of one thread that are inside of no other."""
    end = -math.inf
    for event in events:
        if event.start >= end:
            end = event.end
            yield event


def _is_backward(event: Event) -> bool:
    return event.name.startswith(BACKWARD)


def _backward(top: Sequence[Event]) -> list[Interval]:
    """The backward passes: from the first to the last of operations of autograd's engine that follow each other."""
    found: list[Interval] = []
    goes_on = False
    for event in top:
        if _is_backward(event):
            found.append((found.pop()[0] if goes_on else event.start, event.end))
            goes_on = True
        elif not event.name.startswith("c10d::"):
            goes_on = False
    return found


def _silent_waits(top: Sequence[Event], calls: Sequence[Call]) -> Iterator[Interval]:
    """Waits of DDP in C++, after a backward pass and for buffers: gaps in which communication ends, until it does.

    What waits may go on before the thread that communicated has noted its end: what was under way when the gap began
    may end as long after the gap as the gap is.
    """
    ended = sorted((call.end, call.start) for call in calls)
    for before, after in pairwise(top):
        if _is_backward(before) or before.name == "c10d::broadcast_":
            first, beyond = (bisect_right(ended, (moment, math.inf)) for moment in (before.end, after.start))
            latest = bisect_right(ended, (2 * after.start - before.end, -math.inf))
            if any(start <= before.end for _, start in ended[beyond:latest]):
                yield before.end, after.start
            elif first < beyond:
                yield before.end, ended[beyond - 1][0]


def _calls(own: Sequence[Event], sent: Sequence[Event]) -> list[Call]:
    """Each communication with what started it: of the operations of its size the first that has started no other."""
    open_events: list[Event] = []
    started: list[tuple[Event, tuple[str, ...]]] = []
    by_size: defaultdict[tuple[str, int], deque[int]] = defaultdict(deque)
    for event in own:
        open_events = [other for other in open_events if other.end > event.start]
        if event.name.startswith("c10d::"):
            for size in _sizes(event):
                by_size[_kind(event), size].append(len(started))
            started.append((event, tuple(other.name for other in open_events)))
        open_events.append(event)
    found = []
    taken: set[int] = set()
    awaited = [event.interval for event in own if event.name == WAITING]
    for transfer in sent:
        queues = [by_size[_kind(transfer), size] for size in _sizes(transfer)]
        for queue in queues:
            while queue and queue[0] in taken:
                queue.popleft()
        first = min((queue[0] for queue in queues if queue), default=None)
        event, within = transfer, tuple[str, ...]()
        if first is not None and started[first][0].start <= transfer.end:
            taken.add(first)
            event, within = started[first]
        found.append(
            Call(
                operation=_operation(event.name),
                bytes=max(_sizes(event) | _sizes(transfer)) * _item_bytes(transfer),
                start=min(event.start, transfer.start),
                end=transfer.end,
                within=within,
                peer=_peer(event),
                held=(event.interval, *_around(transfer.end, awaited)) if _kind(event) else None,
            )
        )
    return sorted(found, key=lambda call: call.start)


def _around(moment: float, times: Sequence[Interval]) -> Sequence[Interval]:
    """That of sorted times in which the moment lies."""
    place = bisect_right(times, (moment, math.inf))
    return [one for one in times[max(0, place - 1) : place] if moment <= one[1]]


def _kind(event: Event) -> str:
    """What tells apart what starts communication: a message, which is sent as it is called, or anything else."""
    operation = _operation(event.name)
    return operation if operation in POINT_TO_POINT else ""


def _operation(name: str) -> str:
    plain = re.sub(r"^(c10d::|gloo:|nccl:)_?", "", name).lower()
    joined = plain.replace("_", "")
    return next((known for begins, known in _OPERATIONS.items() if joined.startswith(begins)), plain)


def _sizes(event: Event) -> set[int]:
    """Numbers of elements of the tensors of an operation; lists of tensors count as one, too."""
    found = set()
    for argument in event.facts.get("Input Dims", []):
        nested = bool(argument) and isinstance(argument[0], list)
        several = [math.prod(shape) for shape in (argument if nested else [argument]) if shape or nested]
        found |= {*several, sum(several)} if several else set()
    return found or {0}


def _item_bytes(event: Event) -> int:
    """Size of an element, by torch's name of its type, such as ``c10::BFloat16``."""
    name = next(iter(event.facts.get("Input type", [])), "").lower().removeprefix("c10::").removesuffix(" int")
    return _BYTES.get(name, 1)


def _peer(event: Event) -> int | None:
    """The other rank of ``c10d::send(tensors, group, rank, tag)``."""
    if _operation(event.name) not in POINT_TO_POINT:
        return None
    inputs = event.facts.get("Concrete Inputs", [])
    return int(inputs[2]) if len(inputs) > 2 and str(inputs[2]).isdecimal() else None


def _of_device(
    steps: Sequence[Interval],
    parts: Mapping[str, Sequence[Interval]],
    events: Sequence[Event],
    on_device: Sequence[Event],
) -> Trace:
    backward = union(
        event.interval for event in events if event.kind in _ON_HOST and event.name.startswith((*BACKWARD, _ROOT_ENDS))
    )
    by_phase = {
        "data": union(parts[DATA]),
        "backward": backward,
        "forward": subtract(union(parts[GRADIENTS]), backward),
        "optimizer": union(parts[UPDATE]),
    }
    launches = _launches(events)
    is_sent = {id(event) for event in on_device if event.name.startswith("nccl")}
    computed = [event for event in on_device if id(event) not in is_sent]
    phases: dict[str, list[Interval]] = {name: [] for name in ("data", "forward", "backward", "optimizer")}
    busy = union(event.interval for event in computed)
    calls = [nccl_call(event) for event in on_device if id(event) in is_sent]
    waits = subtract(union((call.start, call.end) for call in calls), busy)
    begins = [begin for begin, _ in steps]
    end = begins[0]
    for event in computed:  # with the moments of its step before it, in which nothing was computed
        end = max(end, begins[max(0, bisect_right(begins, event.start) - 1)])
        phase = _phase_at(launches.get(event.facts.get("correlation"), event.start), by_phase)
        phases[phase].append((end, max(event.end, end)))
        end = max(end, event.end)
    return _trace(steps, phases, waits, calls)


def _phase_at(moment: float, by_phase: Mapping[str, Sequence[Interval]]) -> str:
    for name, times in by_phase.items():
        place = bisect_right(times, (moment, math.inf)) - 1
        if place >= 0 and moment < times[place][1]:
            return name
    return "forward"


def nccl_call(event: Event) -> Call:
    """The operation that a kernel of NCCL carries out."""
    facts = event.facts
    elements = max(int(facts.get("In msg nelems", 0)), int(facts.get("Out msg nelems", 0)))
    item = _BYTES.get(str(facts.get("dtype", "")).lower(), 1)
    named = str(facts.get("Collective name") or re.sub(r"ncclDevKernel_|nccl(Dev)?Kernel_?", "", event.name))
    listed = str(facts.get("Process Group Ranks", ""))
    ranks = tuple(map(int, re.findall(r"\d+", listed))) if "..." not in listed else ()
    operation = _operation(named.lstrip("_"))
    other = facts.get({"send": "Dst Rank", "recv": "Src Rank"}.get(operation, ""))
    return Call(
        operation=operation,
        bytes=elements * item,
        start=event.start,
        end=event.end,
        peer=ranks.index(int(other)) if other is not None and int(other) in ranks else None,
        ranks=ranks or None,
        group=facts.get("Process Group Name"),
    )
