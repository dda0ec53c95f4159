"""One rank's profiled steps, read from the trace of torch's profiler.

On a CPU the thread that runs the steps computes, except while it waits for communication, which runs in separate
threads (``gloo:*``). It waits in labeled waits (:data:`WAITING`), in operations that start or await communication, and
in C++ when DDP awaits its last bucket: an all-reduce then ends between a backward pass and the next operation.

On a GPU, NCCL's kernels communicate and all others compute. Idle time before the last kernel of a step is spent waiting
for the host: for its batch, or for the launch of the next kernel.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ptdbench.profiling.events import (
    CommCall,
    Event,
    Interval,
    calls_of_gloo,
    calls_of_nccl,
    events_of,
    intersect,
    is_by_copy_engines,
    is_of_nccl,
    launches_of,
    subtract,
    union,
    value_at,
)

#: The prefix of a step's label, before its number: torch's own, which other tools know.
STEP = "ProfilerStep#"

#: The other labels in a trace: the parts of a step, and waiting for communication.
DATA, GRADIENTS, UPDATE, WAITING = (f"ptdbench::{name}" for name in ("data", "gradients", "update", "waiting"))

#: Prefixes of event names in a backward pass.
BACKWARD = ("autograd::engine::evaluate_function", "torch::distributed::reducer", "torch.distributed.ddp.reducer")
#: FSDP's root reduces the remaining gradients after the last operation of autograd.
_ROOT_ENDS = "FSDP::root_post_backward"

#: Larger traces are not read: as Python objects they take several times as much memory, in each rank.
MOST_BYTES = 2**29

#: Kinds of events of the host.
_ON_HOST = ("user_annotation", "cpu_op")

_AWAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Trace:
    """One rank's profiled steps; all times are in seconds since the epoch."""

    steps: Sequence[Interval]  #: When each step ran.
    #: When ``data``, ``forward``, ``backward`` and ``optimizer`` ran, and when a GPU waited for its ``host``: disjoint,
    #: and without the waits.
    phases: Mapping[str, Sequence[Interval]]
    waits: Sequence[Interval]  #: When communication was exposed; disjoint, and within the steps.
    calls: Sequence[CommCall]  #: The communication operations, also outside the steps, ordered by start.


def read(path: Path, device_type: str = "cpu") -> Trace:
    """Read a trace in Chrome's format.

    Raises:
        ValueError: The trace is damaged or too large, or has no profiled step, or no GPU activity that it needs.
    """
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than the {MOST_BYTES} that are read; try profile.steps=1")
    try:
        return _read(path, device_type)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of torch's profiler ({type(error).__name__}: {error})") from None


def _read(path: Path, device_type: str) -> Trace:
    events = events_of(path)
    steps = [event for event in events if event.name.startswith(STEP) and event.kind == "user_annotation"]
    if not steps:
        raise ValueError(f"{path} has no profiled step")
    on_device = [event for event in events if event.kind in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_host = [event for event in events if event.thread == steps[0].thread and event.kind in _ON_HOST]
    parts = {name: [event.interval for event in on_host if event.name == name] for name in (DATA, GRADIENTS, UPDATE)}
    whole = [step.interval for step in steps]
    by_gloo = [event for event in events if event.name.startswith("gloo:")]
    if device_type == "cpu":
        return _of_host(whole, parts, on_host, by_gloo)
    if not on_device:
        raise ValueError(f"{path} has no kernels: the profiler could not trace the GPU")
    if by_gloo:
        raise ValueError(f"{path} does not show when a GPU waits for gloo; try backend=nccl")
    return _of_device(whole, parts, events, on_device)


def _of_host(
    steps: Sequence[Interval],
    parts: Mapping[str, Sequence[Interval]],
    events: Sequence[Event],
    transfers: Sequence[Event],
) -> Trace:
    calls = calls_of_gloo(events, transfers, [event.interval for event in events if event.name == WAITING])
    top = list(_outermost([event for event in events if event.kind == "cpu_op"]))
    waits = [event.interval for event in events if event.name in (WAITING, _AWAIT) or event.name.startswith("c10d::")]
    waits = union([*waits, *intersect(list(_silent_waits(top, calls)), parts[GRADIENTS])])
    return _trace(steps, _by_phase(parts, intersect(_backward(top), parts[GRADIENTS])), waits, calls)


def _by_phase(parts: Mapping[str, Sequence[Interval]], backward: list[Interval]) -> dict[str, list[Interval]]:
    forward = subtract(union(parts[GRADIENTS]), backward)
    return {"data": union(parts[DATA]), "forward": forward, "backward": backward, "optimizer": union(parts[UPDATE])}


def _trace(
    steps: Sequence[Interval],
    phases: Mapping[str, Sequence[Interval]],
    waits: Sequence[Interval],
    calls: list[CommCall],
) -> Trace:
    """Create the trace, with everything but the calls limited to the steps."""
    inside = union(steps)
    waits = intersect(waits, inside)
    limited = {name: intersect(subtract(union(times), waits), inside) for name, times in phases.items()}
    return Trace(steps, limited, waits, calls)


def _outermost(events: Sequence[Event]) -> Iterator[Event]:
    end = -math.inf
    for event in events:
        if event.start >= end:
            end = event.end
            yield event


def _backward(top: Sequence[Event]) -> list[Interval]:
    """Return the backward passes: sequences of consecutive operations of autograd's engine."""
    passes: list[Interval] = []
    goes_on = False
    for event in top:
        if event.name.startswith(BACKWARD):
            passes.append((passes.pop()[0] if goes_on else event.start, event.end))
            goes_on = True
        elif not event.name.startswith("c10d::"):
            goes_on = False
    return passes


def _silent_waits(top: Sequence[Event], calls: Sequence[CommCall]) -> Iterator[Interval]:
    """Yield DDP's waits in C++ after a backward pass: gaps in which communication ends, up to its end.

    The waiting thread may continue before the communicating thread has recorded the end: a call in flight at the start
    of the gap may end after the gap, by up to the length of the gap.
    """
    ended = sorted((call.end, call.start) for call in calls)
    for before, after in pairwise(top):
        if before.name.startswith(BACKWARD):
            first, beyond = (bisect_right(ended, (moment, math.inf)) for moment in (before.end, after.start))
            latest = bisect_right(ended, (2 * after.start - before.end, -math.inf))
            if any(start <= before.end for _, start in ended[beyond:latest]):
                yield before.end, after.start
            elif first < beyond:
                yield before.end, ended[beyond - 1][0]


def _of_device(
    steps: Sequence[Interval],
    parts: Mapping[str, Sequence[Interval]],
    events: Sequence[Event],
    on_device: Sequence[Event],
) -> Trace:
    backward = union(
        event.interval for event in events if event.kind in _ON_HOST and event.name.startswith((*BACKWARD, _ROOT_ENDS))
    )
    by_phase = _by_phase(parts, backward)
    launches, inside = launches_of(events), union(steps)
    computed = [event for event in on_device if not is_of_nccl(event)]
    calls = calls_of_nccl(events, (event for event in on_device if is_of_nccl(event)))
    if is_by_copy_engines(events, calls):
        raise ValueError("all-gathers by copy engines look like other copies in the trace; unset NCCL_CTA_POLICY")
    kernels = [event for event in computed if event.kind == "kernel"]
    copies = [event for event in computed if event.kind != "kernel"]
    busy = union(event.interval for event in computed)
    sent = union((call.start, call.end) for call in calls)
    phases = _launched_by(kernels, launches, by_phase)
    computing = union(event.interval for event in kernels)
    for name, times in _launched_by(copies, launches, by_phase).items():
        phases[name] += subtract(times, computing)  # copies that overlap with kernels do not count for a phase
    worked = union([*busy, *sent])
    ends = [(max((stop for _, stop in intersect(worked, [step])), default=step[0]), step[1]) for step in steps]
    idle = subtract(inside, union([*worked, *ends]))  # the rest of a step after its last work is not a wait
    phases["data"] += intersect(idle, by_phase["data"])
    phases["host"] = subtract(idle, by_phase["data"])
    return _trace(steps, phases, subtract(sent, busy), calls)


def _launched_by(
    events: Sequence[Event], launches: Mapping[Any, float], by_phase: Mapping[str, Sequence[Interval]]
) -> dict[str, list[Interval]]:
    """Return when the device ran the work of each phase that launched it; overlap counts for the earlier start."""
    spans = sorted((time, name) for name, times in by_phase.items() for time in times)
    ran: dict[str, list[Interval]] = {name: [] for name in by_phase}
    end = -math.inf
    for event in events:
        if event.end > end:
            phase = value_at(launches.get(event.facts.get("correlation"), event.start), spans) or "forward"
            ran[phase].append((max(event.start, end), event.end))
            end = event.end
    return ran
