"""Account of a run on virtual GPUs: memory, kernels, messages, and host time."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.files import lack_of_space
from ptdbench.job import Job
from ptdbench.launch import rendezvous
from ptdbench.launch.collect import gather
from ptdbench.measure import memory
from ptdbench.parallel.comm_volume import Size
from ptdbench.profiling import trace
from ptdbench.training import profile
from ptdbench.training.loop import StepLoop


@dataclass(frozen=True)
class _Own:
    """The account of one rank."""

    allocated: int  #: Peak memory allocated by PyTorch, in bytes.
    reserved: int  #: Peak memory that PyTorch reserved on the device, in bytes.
    communicators: int  #: Number of process groups with several ranks.
    #: Seconds that the host took to launch a step; ``None`` if not measured.
    host_seconds: float | None = None
    kernels: Counter[str] = field(default_factory=Counter)  #: Kernels of a step by kind.
    calls: Counter[str] = field(default_factory=Counter)  #: Communication calls of a step by operation.
    bytes: Counter[str] = field(default_factory=Counter)  #: Bytes of these calls.
    reason: str | None = None  #: Why kernels and messages are unknown.


def account(job: Job, loop: StepLoop, volume: Mapping[str, Size]) -> dict[str, Any] | None:
    """Run a step to time the host, and one under the profiler, unless ``profile.steps=0``.

    Called in all present ranks, when the steps of the loop are drained. On the first rank ``volume`` has the bytes of
    each communication operation in a step by formula.

    Returns:
        On the first rank the record's field ``virtual``, see :class:`ptdbench.records.schema.Virtual`.
    """
    machine = job.spec.virtual
    assert machine
    told: list[_Own] = gather(_own(job, loop))
    if not job.world.is_first:
        return None
    ranks = present(job)
    owns = [told[rank] for rank in ranks]
    kinds = dict.fromkeys(kind for one in owns for kind in one.kernels)
    operations = dict.fromkeys(operation for one in owns for operation in one.calls)
    return {
        "device": machine.gpu_name,
        "real_time": machine.real_time,
        "ranks": ranks,
        "allocated_bytes": [one.allocated for one in owns],
        "reserved_bytes": [one.reserved for one in owns],
        "context_bytes": machine.gpu.context,
        "communicators": [one.communicators for one in owns],
        "host_seconds": [one.host_seconds for one in owns] if job.spec.config.profile.steps else None,
        "kernels": {kind: [one.kernels[kind] for one in owns] for kind in kinds},
        "messages": {
            operation: {
                "calls": fmean(one.calls[operation] for one in owns),
                "bytes": fmean(one.bytes[operation] for one in owns) or None,
                "formula_bytes": None if isinstance(size := volume.get(operation), tuple) else size,
            }
            for operation in operations
        },
        "reason": next((one.reason for one in owns if one.reason), None),
    }


def present(job: Job) -> list[int]:
    """Return the ranks that really run."""
    return list(job.world.present or range(job.world.size))


def settle() -> None:
    """Wait until NCCL's watchdog has seen that all work is done, as it would during the slower steps of a real GPU.

    Up to torch 2.14 the watchdog keeps the tensors of messages alive until then, and polls ten times a second: how much
    memory that is would depend on this machine. Its replacement in 2.15 does not keep them.
    """
    for group in _communicating():
        if rendezvous.is_watched(group):
            group._wait_for_pending_works()


def _own(job: Job, loop: StepLoop) -> _Own:
    peaks = memory.peak_bytes(job.device), memory.peak_reserved_bytes(job.device)  # of the steps before
    own = _Own(*peaks, len(_communicating()))
    if not job.spec.config.profile.steps:
        return replace(own, reason="profile.steps=0")
    own = replace(own, host_seconds=_host_seconds(job, loop))
    with job.display.during("profiling"):
        try:
            return replace(own, **_launched(job, loop))
        except (OSError, RuntimeError, ValueError) as error:
            why = lack_of_space(error, Path(tempfile.gettempdir())) or error
            return replace(own, reason=f"the trace cannot be written and read: {why}")
        finally:
            settle()
            memory.trim()


def _launched(job: Job, loop: StepLoop) -> dict[str, Any]:
    """Run a step under the profiler; return its kernels by kind, and calls and bytes of messages by operation."""
    with tempfile.TemporaryDirectory(prefix="ptdbench-trace-") as scratch:
        path = Path(scratch) / "trace.json"
        profile.run(job, loop, 1).export_chrome_trace(str(path))
        memory.trim()  # a step of a large model has 150,000 events
        launched, called = trace.launched_in_steps(path)
    kernels = Counter(profile.kernel_kind(kernel.name) for kernel in launched)
    size = Counter[str]()
    for call in called:
        size[call.operation] += call.bytes
    return {
        "kernels": Counter(dict(kernels.most_common())),
        "calls": Counter(call.operation for call in called),
        "bytes": size,
    }


def _communicating() -> list[dist.ProcessGroup]:
    """Return the NCCL groups of several ranks."""
    groups = dist.distributed_c10d._world.pg_map
    return [group for group in groups if group.size() > 1 and "nccl" in dist.get_backend_config(group)]


def _host_seconds(job: Job, loop: StepLoop) -> float:
    torch.cuda.synchronize(job.device)
    started = time.perf_counter()
    profile.step(loop, loop.done)
    seconds = time.perf_counter() - started
    torch.cuda.synchronize(job.device)
    settle()
    return seconds
