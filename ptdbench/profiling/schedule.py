"""The schedule of a pipeline in a merged trace: which rank computed which micro-batch of which stage, and when."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ptdbench.grouping import grouped
from ptdbench.profiling.perfetto import PROCESSES
from ptdbench.profiling.trace import STEP

#: The prefix of the label of a pass of a micro-batch, before stage, kind and micro-batch: ``1F3``, as torch writes it.
CHUNK = "ptdbench::chunk "

#: The kinds of passes.
PASSES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}

#: Maximum number of passes of a rank in a line.
_MOST = 24

_LABEL = re.compile(rf"{CHUNK}(\d+)([{''.join(PASSES)}])(\d+)")


class Pass(Struct):
    """A pass of a micro-batch through a stage."""

    rank: int
    stage: int
    kind: str  #: One of :data:`PASSES`.
    microbatch: int
    start: float  #: Seconds since the first pass of the step.
    seconds: float


def read(path: Path) -> list[Pass]:
    """Return the passes of the step of median length in a trace from :func:`ptdbench.profiling.perfetto.merge`.

    They are in the order of their start, on the clock of rank 0; empty if the trace has no pipeline, or is damaged. On
    a GPU a pass is from its first kernel to its last one.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = [json.loads(line.rstrip(",\n")) for line in file if CHUNK in line or STEP in line]
        labels = [event for event in events if event["cat"] == "user_annotation" and event["pid"] < PROCESSES]
        steps = sorted((event["dur"], event["ts"]) for event in labels if event["name"].startswith(STEP))
        passes = [event for event in events if event["name"].startswith(CHUNK)]
        if not steps or not passes:
            return []
        length, begin = steps[(len(steps) - 1) // 2]
        inside = [event for event in _of_one_thread_each(passes) if begin <= event["ts"] < begin + length]
        return list(_passes(sorted(inside, key=lambda event: event["ts"])))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _of_one_thread_each(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of each rank's busiest thread or stream; if there are streams, the host only launched."""
    on_device = [event for event in events if event["cat"] == "gpu_user_annotation"]
    lengths: dict[int, defaultdict[tuple[int, Any], float]] = {}
    for event in on_device or events:
        place = event["pid"], event["tid"]
        lengths.setdefault(event["pid"] // PROCESSES, defaultdict(float))[place] += event["dur"]
    busiest = {max(of_rank, key=of_rank.__getitem__) for of_rank in lengths.values()}
    return (event for event in on_device or events if (event["pid"], event["tid"]) in busiest)


def _passes(events: Sequence[dict[str, Any]]) -> Iterator[Pass]:
    for event in events:
        if label := _LABEL.fullmatch(event["name"]):
            start, seconds = ((time / 1e6) for time in (event["ts"] - events[0]["ts"], event["dur"]))
            stage, kind, microbatch = label.groups()
            yield Pass(event["pid"] // PROCESSES, int(stage), kind, int(microbatch), start, seconds)


def lines(passes: Sequence[Pass]) -> Iterator[str]:
    """Yield the order of each rank's passes: ``rank 0: F0 F1 B0 B1, idle 23 %``, with stages if it has several.

    Idle is the share of the time from the first pass of all ranks to the end of the last without a pass.
    """
    length = max((chunk.start + chunk.seconds for chunk in passes), default=0.0)
    for rank, of_rank in sorted(grouped((chunk.rank, chunk) for chunk in passes).items()):
        has_stages = len({chunk.stage for chunk in of_rank}) > 1
        words = [f"{chunk.stage if has_stages else ''}{chunk.kind}{chunk.microbatch}" for chunk in of_rank]
        shown = " ".join([*words[:_MOST], *(["..."] if len(words) > _MOST else [])])
        idle = max(0.0, 1 - sum(chunk.seconds for chunk in of_rank) / length)
        yield f"rank {rank}: {shown}, idle {100 * idle:.0f} %"
