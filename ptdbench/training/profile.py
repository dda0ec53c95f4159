"""The steps after the timed ones: for phases and memory under torch's profiler, and for the account of virtual GPUs.

The timed steps have no labels. The extra ones continue training, but their weights are not used.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function
from torch.distributed.pipelining import PipelineStage

from ptdbench.files import lack_of_space
from ptdbench.grouping import grouped
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.local_part import plain_tensors
from ptdbench.measure import memory
from ptdbench.profiling import allocations, events, perfetto, trace
from ptdbench.profiling.allocations import Usage
from ptdbench.profiling.events import kernels_by_kind
from ptdbench.profiling.phases import KINDS, PHASES, PhaseTimes, Traffic, partition
from ptdbench.records.record import merged_accounts
from ptdbench.records.schema import Communication, Memory, Messages, Metrics, Phases, Virtual
from ptdbench.terminal import echo
from ptdbench.training import traces
from ptdbench.training.loop import StepLoop
from ptdbench.virtual import watch
from ptdbench.virtual.watch import Log

#: Maximum seconds for the steps of the pass; at least one step is run.
MOST_SECONDS = 60.0


def phases(job: Job, loop: StepLoop, metrics: Metrics | None) -> Phases | None:
    """Profile some steps; called in all ranks, as the last part of a run. ``None`` on ranks other than the first."""
    timed: float | None = gather(metrics and metrics.step_seconds and metrics.step_seconds.mean)[0]
    steps = _count(job.spec.config.profile.steps, timed)
    with job.display.during("profiling"), tempfile.TemporaryDirectory(prefix="ptdbench-trace-") as scratch:
        recording = run(job, loop, steps)
        with job.watchdog.paused():
            path = Path(scratch) / "trace.json"
            read = _read(recording, path, job.device.type)
            ahead = traces.clock_ahead(job.world.rank, job.device)
            if job.spec.config.profile.trace:  # even if no phases can be read from it
                # For Holistic Trace Analysis.
                facts = {"backend": job.spec.backend, "rank": job.world.rank, "world_size": job.world.size}
                traces.keep(job, lambda to: perfetto.compress(path, to, facts), ahead)
            if reason := reason_of_any(read):
                return Phases(steps=0, reason=reason)
            assert isinstance(read, trace.Trace)
            ready = traces.ready(read.calls, loop.mesh.groups(), ahead)
            of_ranks: list[PhaseTimes] = gather(partition(read, ready))
    if not job.world.is_first:
        return None
    breakdown = scaled(of_ranks, timed)
    breakdown.stages = traces.stages(job)
    breakdown.bubble_formula = _bubble(job)
    return breakdown


def reason_of_any(result: object) -> str | None:
    """Return the reason of any rank whose result is a text instead; called in all ranks, with the same answer."""
    return next(filter(None, gather(result if isinstance(result, str) else None)), None)


def _count(steps: int, timed: float | None) -> int:
    return max(1, int(min(steps, MOST_SECONDS / timed if timed else math.inf)))


def run(
    job: Job, loop: StepLoop, steps: int, *, with_memory: bool = False, between: Callable[[], None] = lambda: None
) -> profile:
    """Run steps under the profiler, after a warm-up step, which virtual GPUs do not need.

    The steps of the loop must be drained. ``with_memory``: record allocations too; ``between``: called in each step
    once the gradients are complete.
    """
    first = loop.done
    counted = first + (job.spec.virtual is None)
    with closing(loop.feed), profiled(job.device, with_memory) as recording:
        for number in range(first, counted + steps):
            with record_function("warm-up" if number < counted else f"{trace.STEP}{number}"):
                step(loop, number, between)
                if job.device.type == "cuda":
                    torch.cuda.synchronize(job.device)  # so that the device's steps do not overlap
            job.watchdog.alive()
    return recording


def step(loop: StepLoop, number: int, between: Callable[[], None] = lambda: None) -> None:
    """Run one optimizer step as :meth:`StepLoop.step`, with labels instead of a clock."""
    with record_function(trace.DATA):
        inputs, targets = loop.feed(number)
    with record_function(trace.GRADIENTS):
        loop.engine.gradients(inputs, targets, loop.update.scale)
    between()
    with record_function(trace.UPDATE):
        loop.update(number)


def _read(recording: profile, path: Path, device_type: str) -> trace.Trace | str:
    """Write and read the trace, or return why that failed: a full disk costs the phases, not the run."""
    try:
        recording.export_chrome_trace(str(path))
        events_of_rank = trace.read(path, device_type)
        if device_type != "cpu" and any(
            call.operation in events.POINT_TO_POINT and call.peer is None for call in events_of_rank.calls
        ):
            return "NCCL's trace does not name the stages of a message, so waiting would count as communication"
        return events_of_rank
    except (OSError, RuntimeError, ValueError) as error:
        return f"cannot write and read the trace: {lack_of_space(error, path.parent) or error}"


def scaled(of_ranks: Sequence[PhaseTimes], timed: float | None) -> Phases:
    """Return the phases of all ranks, scaled to the timed step."""
    count = len(of_ranks)
    durations = [of_rank.duration / of_rank.steps for of_rank in of_ranks]
    step_seconds = timed or max(durations)
    of_ranks = [_without_profiler(of_rank, step_seconds) for of_rank in of_ranks]
    # With factors from a rank's seconds of all profiled steps to seconds of one timed step.
    scales = [(of_rank, step_seconds / of_rank.duration) for of_rank in of_ranks]
    # By step and rank: how long the other ranks waited for it, on average.
    waited_for = np.zeros((of_ranks[0].steps, count))
    for of_rank, scale in scales:
        for of_step, waited in zip(waited_for, of_rank.waited_for, strict=True):
            for rank, seconds in waited.items():
                if rank >= 0:
                    of_step[rank] += seconds * scale / max(1, count - 1)
    traffic = grouped((name, (sent, scale)) for of_rank, scale in scales for name, sent in of_rank.traffic.items())
    return Phases(
        steps=of_ranks[0].steps,
        profiled_step_seconds=max(durations),
        step_seconds=step_seconds,
        ranks={name: [of_rank.seconds[name] * scale for of_rank, scale in scales] for name in PHASES},
        communication={name: _mean(sent, count * of_ranks[0].steps, count) for name, sent in traffic.items()},
        waited_for=waited_for.sum(axis=0).tolist(),
        waited_for_most=[int(of_step.argmax()) if of_step.any() else None for of_step in waited_for],
    )


def _mean(traffic: Sequence[tuple[Traffic, float]], steps: int, ranks: int) -> Communication:
    """Average an operation over the steps of all ranks; calls with unknown end take the mean time of the others.

    ``traffic``: of each rank, with the factor that scales its seconds to one step.
    """
    calls, ended = sum(sent.calls for sent, _ in traffic), sum(sent.timed for sent, _ in traffic)
    seconds = sum(sent.seconds * scale for sent, scale in traffic) / ranks
    return Communication(
        calls=calls / steps,
        bytes=sum(sent.bytes for sent, _ in traffic) / steps,
        seconds=seconds * calls / ended if ended else 0.0,
        exposed_seconds=sum(sent.exposed_seconds * scale for sent, scale in traffic) / ranks,
    )


def _without_profiler(of_rank: PhaseTimes, step_seconds: float) -> PhaseTimes:
    """Remove the profiler's overhead from the host time: it slows down the host, but no kernels."""
    host = min(of_rank.seconds["host"], max(0.0, of_rank.duration - of_rank.steps * step_seconds))
    left = {**of_rank.seconds, "host": of_rank.seconds["host"] - host}
    return replace(of_rank, duration=of_rank.duration - host, seconds=left)


def _bubble(job: Job) -> float | None:
    layout, strategy = job.training.layout, job.training.strategy
    if layout.dims.pipeline == 1:
        return None
    return strategy.pipeline_schedule.bubble(layout.dims.pipeline, strategy.stages_on_rank, layout.microbatches)


#: The folder in a run's directory with a snapshot of each rank's GPU memory, with ``profile.trace``.
MEMORY_FOLDER = "memory"

#: Maximum number of allocations in a snapshot of a GPU's memory.
_ENTRIES = 200_000


def memory_by_purpose(job: Job, loop: StepLoop) -> Memory | None:
    """Split the memory of a step by purpose, at the end of a run; called in all ranks. ``None`` except on rank 0."""
    state: dict[int, tuple[str, int]] = {}
    keeps = job.spec.config.profile.trace and job.device.type == "cuda"
    with job.display.during("profiling memory"):
        with _snapshot(job) if keeps else nullcontext():
            recording = run(job, loop, 1, with_memory=True, between=partial(_note, state, loop, job.device.type))
        with job.watchdog.paused():
            usage = _usage(recording, state, job.device.type)
            if reason := reason_of_any(usage):
                return Memory(reason=reason)
            assert not isinstance(usage, str)
            of_ranks: list[Usage] = gather(max(usage, key=lambda moment: moment.total))
    if not job.world.is_first:
        return None
    peaks = [of_ranks[rank] for rank in present_ranks(job)]
    return Memory(
        ranks={kind: [peak.bytes[kind] for peak in peaks] for kind in KINDS},
        moments=[peak.moment for peak in peaks],
    )


def present_ranks(job: Job) -> list[int]:
    """Return the ranks that run; on virtual GPUs others may be absent."""
    return list(job.world.present or range(job.world.size))


def _usage(recording: Any, state: dict[int, tuple[str, int]], device_type: str) -> list[Usage] | str:
    """Return the memory of the step, or why it is unknown: a failure must not cost the phases too."""
    try:
        return allocations.usage(allocations.read(recording, device_type), state)
    except Exception as error:  # torch's tree of events is not a public interface
        return f"cannot read the profiler's allocations: {type(error).__name__}: {error}"


def _note(state: dict[int, tuple[str, int]], loop: StepLoop, device_type: str) -> None:
    """Note the kind and the bytes of each storage of the training state, by address."""
    state.clear()
    with record_function(allocations.INVENTORY):
        for kind, tensors in _state(loop).items():
            for storage in (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor)):
                if storage.device.type == device_type:
                    state.setdefault(storage.data_ptr(), (kind, storage.nbytes()))


def _state(loop: StepLoop) -> dict[str, Iterable[Any]]:
    """Return the tensors that live across steps, and the gradients, by kind."""
    weights = list(loop.engine.module.parameters())
    copies = [copy for part in loop.engine.parts if part.copies for copy in part.copies.tensors]
    return {
        "weights": [*weights, *loop.engine.module.buffers(), *copies],
        "gradients": [weight.grad for weight in weights],
        "optimizer": [
            value
            for values in loop.update.optimizer.state.values()
            for value in (values.values() if isinstance(values, Mapping) else ())
        ],
    }


@contextmanager
def _snapshot(job: Job) -> Iterator[None]:
    """Write a snapshot of the GPU's memory after the block, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    try:
        yield
        folder = job.directory / MEMORY_FOLDER
        with job.watchdog.paused():
            try:
                folder.mkdir(exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(folder / f"rank{job.world.rank}.pickle"))
            except (OSError, RuntimeError) as error:  # torch symbolizes stacks, which may fail
                echo(f"warning: cannot write the memory snapshot: {error}", sys.stderr)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def virtual_account(job: Job, loop: StepLoop) -> Virtual | None:
    """Run a step to time the host and count its work, unless ``profile.steps=0``; ``None`` except on rank 0.

    Called in all present ranks, when the steps of the loop are drained.
    """
    of_ranks: list[Virtual] = gather(_of_rank(job, loop))
    return merged_accounts([of_ranks[rank] for rank in present_ranks(job)]) if job.world.is_first else None


def _of_rank(job: Job, loop: StepLoop) -> Virtual:
    machine = job.spec.virtual
    assert machine
    account = Virtual(
        device=machine.gpu_name,
        ranks=[job.world.rank],
        allocated_bytes=[memory.peak_bytes(job.device)],  # of the steps before
        reserved_bytes=[memory.peak_reserved_bytes(job.device)],
        context_bytes=machine.gpu.context,
        communicators=[len(watch.communicating())],
    )
    for _ in range(loop.done, loop.engine.rehearsals + 1):  # DDP rebuilds its buckets in the pass after these
        step(loop, loop.done)
    _write_log(job, loop)
    if not job.spec.config.profile.steps:
        account.reason = "profile.steps=0"
        return account
    with job.display.during("profiling"):
        seconds, counts = _counted_step(job, loop)
    account.host_seconds = [seconds]
    account.kernels = {kind: [count] for kind, count in kernels_by_kind(counts["kernels"]).most_common()}
    account.messages = {name: Messages(calls, counts["bytes"][name]) for name, calls in counts["calls"].items()}
    return account


def _write_log(job: Job, loop: StepLoop) -> None:
    log = Log()
    if not log:
        return
    with job.display.during("profiling"), closing(loop.feed):
        log.begin()
        step(loop, loop.done)
        log.mark()
        log.end()
    watch.settle()
    memory.trim()


def _counted_step(job: Job, loop: StepLoop) -> tuple[float, watch.Account]:
    """Run a step; return the seconds of the host, and what it had the device do."""
    torch.cuda.synchronize(job.device)
    before, started = watch.read_account(), time.perf_counter()
    step(loop, loop.done)
    seconds = time.perf_counter() - started
    torch.cuda.synchronize(job.device)
    watch.settle()
    return seconds, watch.since(before, watch.read_account())


#: A log level above errors, which include the absence of a GPU.
_SILENT = "99"

#: Seconds for gloo's threads to report the end of the last message, even on a busy machine.
_SETTLING = 0.05


@contextmanager
def profiled(device: torch.device, with_memory: bool = False) -> Iterator[profile]:
    """Profile this rank inside the block, ``with_memory`` with allocations too; the profile can be written after it.

    ``torch.profiler.profile`` would import the compiler, which takes a second and a half.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    on_gpu = "cuda" if device.type == "cuda" else None
    watching = profile(use_device=on_gpu, record_shapes=True, use_kineto=True, profile_memory=with_memory)
    with ExitStack() as labels:
        for owner, method, label in _LABELLED:
            labels.enter_context(labelled(owner, method, label))
        recording = labels.enter_context(watching)
        yield recording
        if on_gpu:
            torch.cuda.synchronize(device)
        else:  # in torch 2.11 gloo's threads notify DDP before the profiler, which must still be running then
            time.sleep(_SETTLING)


#: Methods whose calls a trace labels, and the label by the arguments of a call. A CPU trace shows communication, but
#: not what waits for it; and only some of torch's schedules label the passes of their micro-batches.
_LABELLED: tuple[tuple[type, str, Callable[..., str]], ...] = (
    (dist.Work, "wait", lambda *_, **__: trace.WAITING),
    (PipelineStage, "forward_one_chunk", lambda stage, number, *_, **__: _chunk(stage, "F", number)),
    (PipelineStage, "backward_one_chunk",
     lambda stage, number, *_, full_backward=True, **__: _chunk(stage, "B" if full_backward else "I", number)),
    (PipelineStage, "backward_weight_one_chunk", lambda stage, number, *_, **__: _chunk(stage, "W", number)),
)  # fmt: skip


def _chunk(stage: PipelineStage, kind: str, microbatch: int) -> str:
    """Return the label of a pass of a micro-batch, in torch's notation of schedules."""
    return f"{perfetto.CHUNK}{stage.stage_index}{kind}{microbatch}"


@contextmanager
def labelled(owner: type, method: str, label: Callable[..., str]) -> Iterator[None]:
    """Label each call of a method."""
    call = getattr(owner, method)

    def labelled_call(*arguments: Any, **options: Any) -> Any:
        with record_function(label(*arguments, **options)):
            return call(*arguments, **options)

    setattr(owner, method, labelled_call)
    try:
        yield
    finally:
        setattr(owner, method, call)
