"""A predicted step as a trace of torch's profiler, for the code that reads a measured one, and for Perfetto."""

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ptdbench.prediction.replay import Kind
from ptdbench.prediction.steps import Prediction
from ptdbench.profiling import trace
from ptdbench.profiling.phases import PhaseTimes, Ready, partition

#: Processes of the trace: the host, and the device.
_HOST, _DEVICE = 1, 0

#: Kinds of events on a device, by the names of copies and fills; others are kernels.
_KINDS = {
    "HtoD": "gpu_memcpy",
    "DtoH": "gpu_memcpy",
    "DtoD": "gpu_memcpy",
    "HtoH": "gpu_memcpy",
    "memset": "gpu_memset",
}


def write(step: Prediction, path: Path) -> None:
    """Write the trace of a step; the host's part of it may begin earlier, as it runs ahead."""
    path.write_text(json.dumps({"traceEvents": [*_labels(step), *_work(step)], "displayTimeUnit": "ms"}))


def phases(step: Prediction) -> PhaseTimes:
    """Return the phases of a step, as :func:`ptdbench.profiling.phases.partition` has them of a measured one."""
    with tempfile.TemporaryDirectory(prefix="ptdbench-trace-") as folder:
        write(step, path := Path(folder, "trace.json"))
        read = trace.read(path, "cuda")
    called = sorted((step.timeline.starts[place], -step.timeline.ends[place], at) for place, at in _ready(step))
    return partition(read, [Ready(_seconds(since), last) for _, _, (since, last) in called])


def _ready(step: Prediction) -> Iterator[tuple[int, tuple[float, int]]]:
    """Yield the messages of a step: their places, when each could move, and which rank called it last."""
    for place, (since, last) in step.timeline.ready.items():
        yield place, (since, last if since > step.timeline.starts[place] else -1)


def _seconds(moment: float) -> float:
    """Return a moment of a step in the trace, which begins so early that the host is after its beginning."""
    return 1e3 + moment


def _event(name: str, kind: str, process: int, thread: int, start: float, end: float, **facts: Any) -> dict[str, Any]:
    times = {"ts": _seconds(start) * 1e6, "dur": max(0.0, end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, **times, "args": facts}


def _labels(step: Prediction) -> Iterator[dict[str, Any]]:
    """Yield the labels of the step and its parts: autograd's threads compute backward passes."""
    threads, hosts = step.step.threads, step.timeline.hosts
    main, first = threads[0], hosts[0] - step.step.actions[0].host
    label = partial(_event, kind="user_annotation", process=_HOST, thread=main)
    yield label(f"{trace.STEP}0", start=0.0, end=step.seconds)
    last = max((place for place, thread in enumerate(threads) if thread != main), default=-1)
    done = hosts[last] if last >= 0 else first
    yield label(trace.GRADIENTS, start=first, end=done)
    yield label(trace.UPDATE, start=done, end=hosts[-1])
    before = first
    for is_main, block in groupby(range(len(threads)), lambda place: threads[place] == main):
        end = hosts[[*block][-1]]
        if not is_main:
            yield _event(f"{trace.BACKWARD[0]}: predicted", "cpu_op", _HOST, main + 1, before, end)
        before = end


def _work(step: Prediction) -> Iterator[dict[str, Any]]:
    """Yield what the host launches and the device runs."""
    of, line = step.step, step.timeline
    for place, action in enumerate(of.actions):
        if action.kind not in (Kind.WORK, Kind.MESSAGE):
            continue
        issued = line.hosts[place]
        yield _event("cudaLaunchKernel", "cuda_runtime", _HOST, of.threads[place], issued, issued, correlation=place)
        name, facts = of.names[place], dict[str, Any](correlation=place, stream=action.stream, bytes=of.sizes[place])
        if action.kind == Kind.MESSAGE:
            facts |= {"Collective name": of.operations[place], "In msg nelems": of.sizes[place], "dtype": "char"}
        kind = _KINDS.get(name, "kernel")
        yield _event(name, kind, _DEVICE, action.stream, line.starts[place], line.ends[place], **facts)
