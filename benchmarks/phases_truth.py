"""The phases that the profiler found against steps in which communication costs nothing.

    make overhead ARGS="phases --model gpt_small --steps 20 --only ddp fsdp"

Shares of the step, the mean over ranks: by the difference to steps whose communication is done at once and moves
nothing, by the trace, and by the CPU time of the thread that computes, beyond that of a free step. Good is a trace
within 5 points of the difference, or explained by the CPU time, and at most 5 % of a step in no phase.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import to_builtins
from torch._C._distributed_c10d import _create_work_from_future

from benchmarks.rank import on_ranks
from benchmarks.ratio import paired_ratio
from benchmarks.script import keep, options, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.parallel.pipeline_schedules import SCHEDULES
from ptdbench.records.schema import Metrics, StepSeconds
from ptdbench.training import profile
from ptdbench.training.loop import StepLoop
from ptdbench.workloads.train import assemble

#: How far the two shares may be apart, and how much of a rank's step may be in no phase.
POINTS, MOST_OTHER = 0.05, 0.05

#: Ranks and options. Two ranks can be copies or shards, not both.
LAYOUTS = {
    "ddp": (2, "parallel=ddp"),
    "fsdp": (2, "parallel=fsdp"),
    "hsdp": (4, "parallel=hsdp parallel.replicate=2 parallel.shard=2"),
    "tp": (2, "parallel=tp"),
    **{
        f"pdp-{name}": (2, f"parallel=pdp parallel.pipeline=2 parallel.schedule={name}")
        for name, schedule in SCHEDULES.items()
        if schedule.is_supported
    },
}

OPERATIONS = (
    "allreduce_", "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "alltoall_base_", "broadcast_", "send", "recv_",
)  # fmt: skip

#: What of a step is waiting for others.
WAITS = ("communication", "stragglers", "bubble")


def main() -> int:
    """Print a row for each layout; 1 if one of them misses."""
    given = options(
        __doc__,
        model=("gpt_tiny", "a choice of conf/model"),
        steps=(40, "pairs of steps"),
        only=(tuple(LAYOUTS), "these layouts", LAYOUTS),
    )
    headings = "".join(f"{name:>9}" for name in ("trace", "off core", "other", "bubble", "formula"))
    print(f"{'':27}{'step':>8}{'free':>9}{'by difference':>22}{headings}")
    missed = []
    for name in given.only:
        ranks, layout = LAYOUTS[name]
        words = [f"model={given.model}", *layout.split(), f"cluster.ranks_per_node={ranks}", "device=cpu"]
        if not _passes(name, on_ranks(read(*words, "profile.steps=10"), _in_rank, given.steps)):
            missed.append(name)
    keep("phases", f"{len(given.only) - len(missed)} of {len(given.only)} pass")
    return int(bool(missed))


def _passes(name: str, found: Mapping[str, Any]) -> bool:
    """Print the row of a layout, and whether it is as required."""
    phases, (seconds, cpu_seconds), (free_seconds, free_cpu_seconds) = found["phases"], found["step"], found["free"]
    step = np.mean(seconds)
    ratio = paired_ratio(free_seconds, seconds)
    share = 1 - ratio.value
    idle = np.mean(seconds) - np.mean(cpu_seconds) - np.mean(free_seconds) + np.mean(free_cpu_seconds)
    off_core = idle / step
    shares = {phase: np.array(of_ranks) / phases["step_seconds"] for phase, of_ranks in phases["ranks"].items()}
    traced, other = sum(shares[wait].mean() for wait in WAITS), shares["other"].max()
    formula = phases["bubble_formula"]
    bubble = "" if formula is None else f"{shares['bubble'].mean():9.1%}{formula:9.1%}"
    interval = f"({100 * (1 - ratio.high):.1f} to {100 * (1 - ratio.low):.1f})"
    is_near = abs(share - traced) <= POINTS
    is_explained = traced < off_core and abs(share - off_core) <= POINTS
    passes = (is_near or is_explained) and other <= MOST_OTHER
    times = f"{1e3 * step:6.1f}ms{1e3 * np.mean(free_seconds):7.1f}ms"
    print(f"{name:27}{times}{share:7.1%}{interval:>15}{traced:9.1%}{off_core:9.1%}{other:9.1%}{bubble:18}", end="")
    print(f"  {'PASS' if passes else 'MISS'}", flush=True)
    if not is_near:
        print(f"{'':6}{'explained: communication took the core' if is_explained else 'not explained'}", flush=True)
    return bool(passes)


def _in_rank(job: Job, pairs: int) -> dict[str, Any]:
    """The phases, and for both ways the seconds and CPU seconds of each step, the mean over ranks."""
    torch.set_num_threads(1)
    loop, times = assemble(job), dict[str, list[tuple[float, float]]](step=[], free=[])
    for number in range(pairs + 3):
        for way in ("free", "step") if number % 2 else ("step", "free"):
            taken = _timed(loop, is_free=way == "free")
            if number >= 3:  # the first ones allocate
                times[way].append(taken)
    mean = Metrics(step_seconds=StepSeconds(mean=float(np.mean([seconds for seconds, _ in times["step"]]))))
    phases, of_ranks = profile.phases(job, loop, mean, None), gather(times)
    return {
        "phases": to_builtins(phases),
        **{way: np.mean([rank[way] for rank in of_ranks], axis=0).T.tolist() for way in times},
    }


def _timed(loop: StepLoop, is_free: bool) -> tuple[float, float]:
    """Seconds of a step, and those in which the thread that computes was on a core."""
    inputs, targets = loop.feed.peek(loop.done)
    dist.barrier()
    with _free_communication() if is_free else nullcontext():
        began = time.perf_counter(), time.thread_time()
        loop.engine.gradients(inputs, targets, loop.update.scale)
        loop.update(0)
        return time.perf_counter() - began[0], time.thread_time() - began[1]


@contextmanager
def _free_communication() -> Iterator[None]:
    """Operations of communication are done at once, and move nothing."""
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATIONS:
        returns = getattr(torch.ops.c10d, name).default._schema.returns
        library.impl(name, _done_with_tensors if len(returns) > 1 else _done, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _done(tensors: Any, *_: Any) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
    return _create_work_from_future(future).boxed()


def _done_with_tensors(tensors: Any, *_: Any) -> Any:
    return tensors, _done(tensors)


if __name__ == "__main__":
    sys.exit(main())
