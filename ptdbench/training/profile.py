"""The profiling pass: a few further steps under torch's profiler, after the timed ones.

They train on, and nothing looks at the weights afterwards. No clock or label of theirs is in the timed steps.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.measure import bandwidth
from ptdbench.parallel.comm_volume import Size
from ptdbench.profiling import events, perfetto, trace
from ptdbench.profiling.phases import PHASES, Partition, partition
from ptdbench.profiling.trace import WAITING
from ptdbench.training import traces
from ptdbench.training.loop import StepLoop

#: In the directory of a run with ``profile.trace``, beside the trace of all ranks: a folder with one for each rank and
#: a table of the operations of rank 0 that took the longest.
TRACES, OPERATIONS = "trace", "operations.txt"

#: Operations in the table.
_ROWS = 40

#: Seconds that the steps of the pass may take; at least one is done.
MOST_SECONDS = 60.0


@dataclass(frozen=True)
class Expected:
    """A step's expected kernels and messages by its layout."""

    #: Bytes of each operation of communication by formula, see :mod:`ptdbench.parallel.comm_volume`.
    volume: Mapping[str, Size] = field(default_factory=dict)
    #: Of each stage of a pipeline the names of the parts that are no repeated layers; ``None`` without one.
    parts: Sequence[Sequence[str]] | None = None


def expect(job: Job) -> Expected:
    """Predict a step before the model is laid out, which changes it. Empty where nobody asks."""
    training = job.training
    if not job.world.is_first or not job.spec.config.profile.steps:
        return Expected()
    return Expected(training.volume(forced=bool(job.spec.virtual)), training.parts_of_stages())


def phases(job: Job, loop: StepLoop, metrics: Mapping[str, Any] | None, expected: Expected) -> dict[str, Any] | None:
    """Profile some steps; called in all ranks, after everything else of a run.

    Returns:
        On rank 0 the record's field ``phases``, see :class:`ptdbench.records.schema.Phases`.
    """
    asked = job.spec.config.profile.steps
    started = time.perf_counter()
    timed = gather(((metrics or {}).get("step_seconds") or {}).get("mean"))[0]
    steps = _count(asked, timed)
    keep = job.spec.config.profile.trace
    with job.display.during("profiling"), tempfile.TemporaryDirectory(prefix="ptdbench-trace-") as scratch:
        taken = run(job, loop, steps)
        with job.watchdog.paused():
            path = Path(scratch) / "trace.json"
            found = _read(taken, path, job.device.type)
            ahead = traces.clock_ahead(job.world.rank, job.device)
            if keep:  # also where no phases can be read from it
                traces.keep(job, TRACES, partial(_write, job, taken, path), ahead, perfetto.NAME)
            if reasons := [one for one in gather(found if isinstance(found, str) else None) if one]:
                return {"steps": 0, "reason": reasons[0]}
            assert isinstance(found, trace.Trace)
            ready = traces.ready(found.calls, loop.mesh.groups(), ahead)
            of_ranks: list[Partition] = gather(partition(found, ready))
    if not job.world.is_first:
        return None
    fields = {
        **_fields(of_ranks, timed),
        "stages": traces.stages(job),
        "bubble_formula": _bubble(job),
        "stage_parts": expected.parts,
        "stage_links": loop.engine.links,
    }
    for operation, sent in fields["communication"].items():
        size = expected.volume.get(operation)
        sent["formula_bytes"] = None if isinstance(size, tuple) else size
        sent["formula_range"] = [*size] if isinstance(size, tuple) else None
        sent["fit_seconds"] = _fit_seconds(job, operation, sent["calls"], sent["bytes"])
    return {**fields, "pass_seconds": time.perf_counter() - started}


def _count(asked: int, timed: float | None) -> int:
    """The number of steps to profile: as many as were asked for, if they take no longer than ``MOST_SECONDS``."""
    return max(1, int(min(asked, MOST_SECONDS / timed if timed else math.inf)))


def run(
    job: Job, loop: StepLoop, steps: int, *, memory: bool = False, between: Callable[[], None] = lambda: None
) -> profile:
    """Run steps under the profiler, and one before them that is not looked at, but on a virtual GPU, which needs none.

    The steps of the loop are drained. With ``memory`` allocations are watched, too; ``between`` is called in each step
    when the gradients are there.
    """
    first = loop.done
    counted = first + (job.spec.virtual is None)
    with closing(loop.feed), profiled(job.device, memory) as taken:
        for number in range(first, counted + steps):
            with record_function("warm-up" if number < counted else f"{trace.STEP}{number}"):
                step(loop, number, between)
                if job.device.type == "cuda":
                    torch.cuda.synchronize(job.device)  # so that the device's steps do not overlap
            job.watchdog.alive()
    return taken


def step(loop: StepLoop, number: int, between: Callable[[], None] = lambda: None) -> None:
    """Take one optimizer step, as in :meth:`StepLoop.step`, with labels instead of a clock."""
    with record_function(trace.DATA):
        inputs, targets = loop.feed(number)
    with record_function(trace.GRADIENTS):
        loop.engine.gradients(inputs, targets, loop.update.scale)
    between()
    with record_function(trace.UPDATE):
        loop.update(number)


def _read(taken: profile, path: Path, device_type: str) -> trace.Trace | str:
    """The trace, written to ``path``, or why there is none: a full disk costs the phases and not the run."""
    try:
        taken.export_chrome_trace(str(path))
        found = trace.read(path, device_type)
        if device_type != "cpu" and any(
            call.operation in events.POINT_TO_POINT and call.peer is None for call in found.calls
        ):
            return "NCCL's trace does not say between which stages a message went: waiting would pass for communication"
        return found
    except (OSError, RuntimeError, ValueError) as error:
        return f"the trace cannot be written and read: {error}"


def _write(job: Job, taken: profile, trace: Path, path: Path) -> None:
    """Write the trace of this rank, for Holistic Trace Analysis, and on rank 0 a table of operations."""
    perfetto.compress(trace, path, traces.facts(job))
    if job.world.is_first:
        order = "self_cuda_time_total" if taken.use_device == "cuda" else "self_cpu_time_total"
        table = taken.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=80)
        (path.parent / OPERATIONS).write_text(str(table))


def _fields(of_ranks: Sequence[Partition], timed: float | None) -> dict[str, Any]:
    """The partitions of all ranks, scaled to the timed step."""
    durations = [one.duration / one.steps for one in of_ranks]
    step_seconds = timed or max(durations)
    of_ranks = [_without_profiler(one, step_seconds) for one in of_ranks]
    #: From seconds of all steps of a rank to seconds of one timed step.
    scales = [step_seconds / one.duration for one in of_ranks]
    #: By step and rank, the mean over the others.
    waited_for = np.zeros((of_ranks[0].steps, len(of_ranks)))
    for one, scale in zip(of_ranks, scales, strict=True):
        for of_step, waited in zip(waited_for, one.waited_for, strict=True):
            for rank, seconds in waited.items():
                if rank >= 0:
                    of_step[rank] += seconds * scale / max(1, len(of_ranks) - 1)
    return {
        "steps": of_ranks[0].steps,
        "reason": None,
        "profiled_step_seconds": max(durations),
        "step_seconds": step_seconds,
        "ranks": {
            name: [one.seconds[name] * scale for one, scale in zip(of_ranks, scales, strict=True)] for name in PHASES
        },
        "communication": _communication(of_ranks, scales),
        "waited_for": waited_for.sum(axis=0).tolist(),
        "waited_for_most": [int(of_step.argmax()) if of_step.any() else None for of_step in waited_for],
    }


def _without_profiler(one: Partition, step_seconds: float) -> Partition:
    """The same steps without what the profiler took of a host that a GPU waited for: it slows down no kernel."""
    host = min(one.seconds["host"], max(0.0, one.duration - one.steps * step_seconds))
    left = {**one.seconds, "host": one.seconds["host"] - host}
    return replace(one, duration=one.duration - host, seconds=left)


def _communication(of_ranks: Sequence[Partition], scales: Sequence[float]) -> dict[str, dict[str, float]]:
    """Each operation, as the mean over ranks of one step; calls whose end is unknown count as the others do."""
    found: dict[str, dict[str, float]] = {}
    known: defaultdict[str, float] = defaultdict(float)
    for one, scale in zip(of_ranks, scales, strict=True):
        for name, of_one in one.traffic.items():
            mean = found.setdefault(name, dict.fromkeys(("calls", "bytes", "seconds", "exposed_seconds"), 0.0))
            known[name] += of_one.known / one.steps / len(of_ranks)
            mean["calls"] += of_one.calls / one.steps / len(of_ranks)
            mean["bytes"] += of_one.bytes / one.steps / len(of_ranks)
            mean["seconds"] += of_one.seconds * scale / len(of_ranks)
            mean["exposed_seconds"] += of_one.exposed_seconds * scale / len(of_ranks)
    for name, mean in found.items():
        mean["seconds"] *= mean["calls"] / known[name] if known[name] else 0.0
    return found


def _fit_seconds(job: Job, operation: str, calls: float, size: float) -> float | None:
    """What an operation takes by the line that ``workload=collectives`` fitted, if its calls concern all ranks."""
    dims, how = job.training.layout.dims, job.training.strategy
    if max(getattr(dims, name) for name in dims.order()) < dims.world_size:
        return None
    precision = {"tf32": "fp32"}.get(name := job.spec.config.general.precision, name)  # cut products are not in fp8
    dtype = precision if dims.tensor > 1 else how.sent  # the ranks of a product add up activations
    return bandwidth.fitted_seconds(bandwidth.fits_key(job.spec.backend, job.peers), operation, dtype, calls, size)


def _bubble(job: Job) -> float | None:
    """The bubble by the formula of the schedule, in a pipeline."""
    layout, how = job.training.layout, job.training.strategy
    if layout.dims.pipeline == 1:
        return None
    return how.pipeline_schedule.bubble(layout.dims.pipeline, how.stages_on_rank, layout.microbatches)


#: Above the level of errors, one of which is that a machine without a GPU has none.
_SILENT = "99"

#: Seconds in which threads of gloo note the end of the last message, on a machine that is busy, too.
_SETTLING = 0.05


@contextmanager
def profiled(device: torch.device, memory: bool = False) -> Iterator[profile]:
    """Watch what this rank does inside of the block; what was seen can be written after it.

    With ``memory`` also what memory is allocated and freed. Not by ``torch.profiler.profile``, which imports the
    compiler for a second and a half.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    on_gpu = "cuda" if device.type == "cuda" else None
    watching = profile(use_device=on_gpu, record_shapes=True, use_kineto=True, profile_memory=memory)
    with labelled_waits(), watching as taken:
        yield taken
        if on_gpu:
            torch.cuda.synchronize(device)
        else:  # torch 2.11's threads of gloo tell DDP first, and then the profiler, which must still be there
            time.sleep(_SETTLING)


@contextmanager
def labelled_waits() -> Iterator[None]:
    """Label each ``Work.wait()``: a trace of the CPU shows what communicates, but not what waits for it."""
    wait = dist.Work.wait

    def labelled(self: dist.Work, *arguments: Any, **options: Any) -> Any:
        with record_function(WAITING):
            return wait(self, *arguments, **options)

    dist.Work.wait = labelled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


#: Kinds by what their kernels' names have, the first that fits; ``other`` where none does.
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
