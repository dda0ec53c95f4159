"""The account of a run on virtual GPUs: memory, kernels, messages, and host time."""

import time
from contextlib import closing

import torch

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.measure import memory
from ptdbench.profiling.events import kernels_by_kind
from ptdbench.records.record import merged_accounts
from ptdbench.records.schema import Messages, Virtual
from ptdbench.training import profile
from ptdbench.training.loop import StepLoop
from ptdbench.virtual import watch
from ptdbench.virtual.watch import Log


def account(job: Job, loop: StepLoop) -> Virtual | None:
    """Run a step to time the host and count its work, unless ``profile.steps=0``; ``None`` except on rank 0.

    Called in all present ranks, when the steps of the loop are drained.
    """
    of_ranks: list[Virtual] = gather(_of_rank(job, loop))
    return merged_accounts([of_ranks[rank] for rank in profile.present_ranks(job)]) if job.world.is_first else None


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
        profile.step(loop, loop.done)
    _write_log(job, loop)
    if not job.spec.config.profile.steps:
        account.reason = "profile.steps=0"
        return account
    with job.display.during("profiling"):
        seconds, step = _step(job, loop)
    account.host_seconds = [seconds]
    account.kernels = {kind: [count] for kind, count in kernels_by_kind(step["kernels"]).most_common()}
    account.messages = {name: Messages(calls, step["bytes"][name]) for name, calls in step["calls"].items()}
    return account


def _write_log(job: Job, loop: StepLoop) -> None:
    """Write a log of a step if one was requested."""
    log = Log()
    if not log:
        return
    with job.display.during("profiling"), closing(loop.feed):
        log.begin()
        profile.step(loop, loop.done)
        log.mark()
        log.end()
    watch.settle()
    memory.trim()


def _step(job: Job, loop: StepLoop) -> tuple[float, watch.Account]:
    """Run a step; return the seconds of the host, and what it had the device do."""
    torch.cuda.synchronize(job.device)
    before, started = watch.read_account(), time.perf_counter()
    profile.step(loop, loop.done)
    seconds = time.perf_counter() - started
    torch.cuda.synchronize(job.device)
    watch.settle()
    return seconds, watch.since(before, watch.read_account())
