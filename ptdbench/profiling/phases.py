"""Phases of a step: a partition of its time on each rank, as docs/breakdown.md defines them."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ptdbench.profiling.events import COMBINE, LABELED, POINT_TO_POINT, Interval, length, union
from ptdbench.profiling.trace import Trace

#: The phases of a step.
PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "communication": "exposed communication",
    "stragglers": "waiting for slower ranks",
    "experts": "waiting for the fullest experts",
    "bubble": "pipeline bubble",
    "host": "waiting for the host",
    "optimizer": "optimizer",
    "other": "other",
}

#: The kinds of memory by purpose.
KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "communication": "communication buffers",
    "other": "other memory",
}


#: The phase of waiting for other ranks to call these operations, if not stragglers: ranks leave the dispatch together,
#: and compute their experts until they combine.
_WAITING = {LABELED[COMBINE]: "experts"}


@dataclass(frozen=True)
class Ready:
    """When an operation could begin."""

    since: float  #: When the last of its ranks called it, in seconds since the epoch by this rank's clock.
    last: int = -1  #: That rank; -1 if unknown.
    #: When a gloo message ended, see :attr:`ptdbench.profiling.events.CommCall.held`; ``None`` if unknown, because
    #: neither rank was awaiting it yet when it could begin.
    done: float | None = None


@dataclass(frozen=True)
class Traffic:
    """One communication operation, in all steps."""

    calls: int  #: Number of calls.
    timed: int  #: Number of calls with a known end.
    bytes: int  #: Total size of all calls.
    seconds: float  #: Seconds in which a call with a known end was in flight.
    exposed_seconds: float  #: Seconds in which the rank waited for it.


@dataclass(frozen=True)
class PhaseTimes:
    """The profiled steps of one rank."""

    steps: int  #: Number of steps.
    duration: float  #: Seconds of all steps.
    seconds: Mapping[str, float]  #: Seconds by phase; no time counts twice.
    traffic: Mapping[str, Traffic]  #: By operation.
    #: Seconds of each step that this rank waited for other ranks to call an operation, by rank.
    waited_for: Sequence[Mapping[int, float]]


def partition(trace: Trace, ready: Sequence[Ready]) -> PhaseTimes:
    """Split the steps of one rank into the phases."""
    seconds = dict.fromkeys(PHASES, 0.0) | {name: length(times) for name, times in trace.phases.items()}
    exposed: defaultdict[str, float] = defaultdict(float)
    begins = [begin for begin, _ in trace.steps]
    waited_for: list[defaultdict[int, float]] = [defaultdict(float) for _ in begins]
    for (start, end), call, is_late in divided(trace, ready):
        if not is_late:
            seconds["communication"] += end - start
            exposed[trace.calls[call].operation if call is not None else "unknown"] += end - start
            continue
        assert call is not None
        operation = trace.calls[call].operation
        seconds["bubble" if operation in POINT_TO_POINT else _WAITING.get(operation, "stragglers")] += end - start
        waited_for[bisect_right(begins, start) - 1][ready[call].last] += end - start
    duration = length(trace.steps)
    seconds["other"] = max(0.0, duration - sum(seconds.values()))  # rounding can make it negative
    return PhaseTimes(len(trace.steps), duration, seconds, _traffic(trace, ready, exposed), waited_for)


def divided(trace: Trace, ready: Sequence[Ready]) -> Iterator[tuple[Interval, int | None, bool]]:
    """Split waits where calls begin, become ready or end; yield each piece, its call, and whether it is not ready."""
    starts = [call.start for call in trace.calls]
    bounds = {moment for call in trace.calls for moment in (call.start, call.end)}
    edges = sorted(bounds | {call.since for call in ready})
    longest = max((call.end - call.start for call in trace.calls), default=0.0)
    for start, end in trace.waits:
        inside = edges[bisect_left(edges, start) : bisect_left(edges, end)]
        last = max(bisect_left(starts, start) - 1, 0) if starts else None
        for begin, stop in pairwise([start, *inside, end]):
            if stop <= begin:
                continue
            middle = (begin + stop) / 2
            near = range(bisect_left(starts, middle - longest), bisect_left(starts, middle))
            active = [number for number in near if trace.calls[number].holds(middle)]
            moving = [number for number in active if ready[number].since <= middle]
            if moving:
                last = min(moving, key=lambda number: trace.calls[number].end)
            elif active:  # otherwise a call is starting, or its thread has not yet reported its end
                last = min(active, key=lambda number: ready[number].since)
            yield (begin, stop), last, bool(active) and not moving


def _traffic(trace: Trace, ready: Sequence[Ready], exposed: Mapping[str, float]) -> dict[str, Traffic]:
    """Sum up the calls since the first step began."""
    number, size = Counter[str](), Counter[str]()
    times: defaultdict[str, list[Interval]] = defaultdict(list)
    for call, began in zip(trace.calls, ready, strict=True):
        if call.start < trace.steps[0][0]:
            continue
        number[call.operation] += 1
        size[call.operation] += call.bytes
        done = call.end if call.held is None else began.done
        if done is not None:
            times[call.operation].append((min(began.since, done), done))
    return {
        name: Traffic(
            calls=number[name],
            timed=len(times[name]),
            bytes=size[name],
            seconds=length(union(times[name])),
            exposed_seconds=exposed.get(name, 0.0),
        )
        for name in sorted({*number, *exposed})
    }
