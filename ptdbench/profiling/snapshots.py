"""The largest tensors at the peak of a process's GPU memory, from torch's memory snapshot with Python stacks."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdbench.grouping import grouped

#: Frames of a stack that are shown, the innermost first.
_FRAMES = 4


@dataclass(frozen=True)
class Allocated:
    """What was allocated from one place of the program, and alive at the peak."""

    bytes: int
    count: int  #: Tensors.
    stack: Sequence[str]  #: ``file:line function``, the innermost first, without torch's own where there are others.


def largest(path: Path, most: int) -> list[Allocated]:
    """Return what took most memory at the peak, by place, the largest first, ``most`` of them; raises OSError.

    The snapshot is unpickled: it must be of a program that this process has started.
    """
    traces = pickle.loads(path.read_bytes())["device_traces"]
    peaks = map(_at_peak, traces)
    alive = max(peaks, key=lambda entries: sum(entry["size"] for entry in entries), default=[])
    places = grouped((tuple(_stack(entry.get("frames") or [])), entry["size"]) for entry in alive)
    allocated = [Allocated(sum(sizes), len(sizes), stack) for stack, sizes in places.items()]
    return sorted(allocated, key=lambda place: -place.bytes)[:most]


def _at_peak(trace: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the allocations that were alive when a device's allocated memory was largest."""
    entries = [entry for entry in trace if entry["action"] in ("alloc", "free_completed")]
    total = most = end = 0
    for place, entry in enumerate(entries, start=1):
        total += entry["size"] if entry["action"] == "alloc" else -entry["size"]
        if total > most:
            most, end = total, place
    alive: dict[int, Mapping[str, Any]] = {}
    for entry in entries[:end]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        else:
            alive.pop(entry["addr"], None)
    return [*alive.values()]


def _stack(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    outside = [frame for frame in frames if "/torch/" not in frame["filename"]]
    return [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in (outside or frames)[:_FRAMES]]
