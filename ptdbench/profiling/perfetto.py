"""Merges the traces of torch's profiler on all ranks into one, for Perfetto (https://ui.perfetto.dev).

In Chrome's Trace Event Format each rank becomes a process, all of them on the clock of rank 0.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: An event of Chrome's format.
Event = dict[str, Any]

#: The trace of all ranks in the directory of a run.
NAME = "trace.json.gz"

#: Maximum number of arrows in the trace of one rank.
_ARROWS = 2**40

#: Maximum number of processes of one rank in the merged trace: its threads, its GPU, the profiler's own; rank r has the
#: process ids from r times this on.
PROCESSES = 100


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
            processes[pid] = rank * PROCESSES + len(processes)
        changed = {**event, "pid": processes[pid]}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift
        if "id" in event:
            changed["id"] = rank * _ARROWS + int(event["id"])
        if what == "process_name":
            label = f", {'GPU ' * str(pid).isdecimal()}{pid}" if processes[pid] % PROCESSES else ""
            changed["args"] = {"name": name + label}
        elif what == "process_sort_index":
            changed["args"] = {"sort_index": processes[pid]}
        if what != "process_labels":
            yield changed
