"""The traces of torch's profiler on all ranks, merged into one for Perfetto, and the schedule of a pipeline in it.

In Chrome's Trace Event Format, which https://ui.perfetto.dev opens, each rank becomes a process, all of them on the
clock of rank 0.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ptdbench.grouping import grouped
from ptdbench.profiling.trace import STEP

#: An event of Chrome's format.
Event = dict[str, Any]

#: The trace of all ranks in the directory of a run.
NAME = "trace.json.gz"

#: The prefix of the label of a pass of a micro-batch, before stage, kind and micro-batch: ``1F3``, as torch writes it.
CHUNK = "ptdbench::chunk "

#: The kinds of passes.
PASSES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}

#: Maximum number of arrows in the trace of one rank.
_ARROWS = 2**40

#: Maximum number of processes of one rank in the merged trace: its threads, its GPU, the profiler's own; rank r has the
#: process ids from r times this on.
_PROCESSES = 100


def compress(trace: Path, path: Path, facts: Mapping[str, object]) -> None:
    """Write the profiler's trace of one rank compressed, with ``facts`` that tell ranks apart."""
    written = json.loads(trace.read_bytes(), strict=False)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as file:
        json.dump({"distributedInfo": facts, **written}, file)


def merge(traces: Iterable[Path], names: Sequence[str], ahead: Sequence[float], path: Path) -> None:
    """Merge the traces of all ranks into one compressed trace; their clocks are ``ahead`` seconds ahead of rank 0's."""
    origin = None
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for rank, (of_rank, name, offset) in enumerate(zip(traces, names, ahead, strict=True)):
            with gzip.open(of_rank, "rt", encoding="utf-8") as written:
                trace = json.load(written, strict=False)
            base = trace.get("baseTimeNanoseconds", 0)
            origin = base if origin is None else origin
            shift = (base - origin) / 1e3 - 1e6 * offset
            for event in _of_rank(trace["traceEvents"], rank, name, shift):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def _of_rank(events: Iterable[Event], rank: int, name: str, shift: float) -> Iterable[Event]:
    """Yield the events of one rank, with ids of processes and arrows that are unique among ranks."""
    processes: dict[Any, int] = {}
    for event in events:
        what, pid = event.get("name"), event.get("pid")
        if event.get("cat") == "Trace" or pid in ("Spans", "Traces", ""):  # the profiler's events about itself
            continue
        if pid not in processes:
            processes[pid] = rank * _PROCESSES + len(processes)
        changed = {**event, "pid": processes[pid]}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift
        if "id" in event:
            changed["id"] = rank * _ARROWS + int(event["id"])
        if what == "process_name":
            label = f", {'GPU ' * str(pid).isdecimal()}{pid}" if processes[pid] % _PROCESSES else ""
            changed["args"] = {"name": name + label}
        elif what == "process_sort_index":
            changed["args"] = {"sort_index": processes[pid]}
        if what != "process_labels":
            yield changed


#: Maximum number of passes of a rank in a line.
_MOST_PASSES = 24

_LABEL = re.compile(rf"{CHUNK}(\d+)([{''.join(PASSES)}])(\d+)")


class Pass(Struct):
    """A pass of a micro-batch through a stage."""

    rank: int
    stage: int
    kind: str  #: One of :data:`PASSES`.
    microbatch: int
    start: float  #: Seconds since the first pass of the step.
    seconds: float


def read_passes(path: Path) -> list[Pass]:
    """Return the passes of the step of median length in a trace from :func:`merge`.

    They are in the order of their start, on the clock of rank 0; empty if the trace has no pipeline, or is damaged. On
    a GPU a pass is from its first kernel to its last one.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = [json.loads(line.rstrip(",\n")) for line in file if CHUNK in line or STEP in line]
        labels = [event for event in events if event["cat"] == "user_annotation" and event["pid"] < _PROCESSES]
        steps = sorted((event["dur"], event["ts"]) for event in labels if event["name"].startswith(STEP))
        passes = [event for event in events if event["name"].startswith(CHUNK)]
        if not steps or not passes:
            return []
        length, begin = steps[(len(steps) - 1) // 2]
        inside = [event for event in _of_one_thread_each(passes) if begin <= event["ts"] < begin + length]
        return list(_passes(sorted(inside, key=lambda event: event["ts"])))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _of_one_thread_each(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events of each rank's busiest thread or stream; if there are streams, the host only launched."""
    on_device = [event for event in events if event["cat"] == "gpu_user_annotation"]
    lengths: dict[int, defaultdict[tuple[int, Any], float]] = {}
    for event in on_device or events:
        place = event["pid"], event["tid"]
        lengths.setdefault(event["pid"] // _PROCESSES, defaultdict(float))[place] += event["dur"]
    busiest = {max(of_rank, key=of_rank.__getitem__) for of_rank in lengths.values()}
    return (event for event in on_device or events if (event["pid"], event["tid"]) in busiest)


def _passes(events: Sequence[Event]) -> Iterator[Pass]:
    for event in events:
        if label := _LABEL.fullmatch(event["name"]):
            start, seconds = ((time / 1e6) for time in (event["ts"] - events[0]["ts"], event["dur"]))
            stage, kind, microbatch = label.groups()
            yield Pass(event["pid"] // _PROCESSES, int(stage), kind, int(microbatch), start, seconds)


def lines_of_ranks(passes: Sequence[Pass]) -> Iterator[str]:
    """Yield the order of each rank's passes: ``rank 0: F0 F1 B0 B1, idle 23%``, with stages if it has several.

    Idle is the share of the time from the first pass of all ranks to the end of the last without a pass.
    """
    length = max((chunk.start + chunk.seconds for chunk in passes), default=0.0)
    for rank, of_rank in sorted(grouped((chunk.rank, chunk) for chunk in passes).items()):
        has_stages = len({chunk.stage for chunk in of_rank}) > 1
        words = [f"{chunk.stage if has_stages else ''}{chunk.kind}{chunk.microbatch}" for chunk in of_rank]
        shown = " ".join([*words[:_MOST_PASSES], *(["..."] if len(words) > _MOST_PASSES else [])])
        idle = max(0.0, 1 - sum(chunk.seconds for chunk in of_rank) / length)
        yield f"rank {rank}: {shown}, idle {100 * idle:.0f}%"
