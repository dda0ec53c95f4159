"""The phases that the profiler found against steps in which communication costs nothing.

    python benchmarks/phases_truth.py
    python benchmarks/phases_truth.py --model gpt_small --steps 20 --only ddp fsdp

A step is run in two ways that take turns in the same process: as it is, and with torch's operations of communication
replaced by ones that are done at once and move nothing. What is computed with the wrong numbers takes as long. The
difference is the time that communication, waiting for other ranks and the bubble really cost; the profiling pass says
the same from a trace. Both are printed as shares of the step, the mean over ranks. Beside them stand what no phase
explains, on the rank with most of it, and the bubble of a pipeline by the trace and by the formula of its schedule.

On a CPU they differ for a reason: the threads that communicate, and the kernel, take the core from the thread that
computes, and no wait shows that. The third share tells: it is the part of a step in which the thread that computes was
not on a core, by its CPU time, beyond the same part of a free step.
"""

from __future__ import annotations

import argparse
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
from benchmarks.script import parser_of, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.parallel.pipeline.schedules import SCHEDULES
from ptdbench.records.schema import Metrics, StepSeconds
from ptdbench.training import profile
from ptdbench.training.loop import StepLoop
from ptdbench.workloads.train import assemble

#: How far the two shares may be apart, and how much of a rank's step may be in no phase.
POINTS, MOST_OTHER = 0.05, 0.05

LAYOUTS = {
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "hsdp": ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2"],
    "tp": ["parallel=tp"],
    **{
        f"pdp-{name}": ["parallel=pdp", "parallel.pipeline=2", f"parallel.schedule={name}"]
        for name, schedule in SCHEDULES.items()
        if schedule.is_supported
    },
}

#: Two ranks can be copies or shards, not both.
RANKS = {"hsdp": 4}

OPERATIONS = (
    "allreduce_", "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "alltoall_base_", "broadcast_", "send", "recv_",
)  # fmt: skip

#: A step as it is, and with communication that is done at once.
WAYS = ("step", "free")

KINDS = ("seconds", "cpu_seconds")

#: What of a step is waiting for others.
WAITS = ("communication", "stragglers", "bubble")


def main() -> int:
    """Print a row for each layout; 1 if one of them misses."""
    options = _parse()
    print(f"{'':27}{'step':>8}{'free':>9}{'by difference':>22}", end="")
    print("".join(f"{name:>9}" for name in ("trace", "off core", "other", "bubble", "formula")))
    return int(not all([_passes(name, _measured(name, options)) for name in options.only or LAYOUTS]))  # noqa: C419


def _passes(name: str, found: Mapping[str, Any]) -> bool:
    """Print the row of a layout, and whether it is as required."""
    phases, seconds, cpu_seconds = found["phases"], found["seconds"], found["cpu_seconds"]
    step, free = (float(np.mean(seconds[way])) for way in WAYS)
    idle, idle_free = (np.mean(seconds[way]) - np.mean(cpu_seconds[way]) for way in WAYS)
    ratio, off = paired_ratio(seconds["free"], seconds["step"]), (idle - idle_free) / step
    share = 1 - ratio.value
    shares = {phase: np.array(of_ranks) / phases["step_seconds"] for phase, of_ranks in phases["ranks"].items()}
    traced, other = sum(shares[wait].mean() for wait in WAITS), shares["other"].max()
    formula = phases["bubble_formula"]
    bubble = "" if formula is None else f"{shares['bubble'].mean():9.1%}{formula:9.1%}"
    interval = f"({100 * (1 - ratio.high):.1f} to {100 * (1 - ratio.low):.1f})"
    print(f"{name:27}{1e3 * step:6.1f}ms{1e3 * free:7.1f}ms{share:7.1%}{interval:>15}", end="")
    is_near = abs(share - traced) <= POINTS
    is_explained = traced < off and abs(share - off) <= POINTS
    passes = (is_near or is_explained) and other <= MOST_OTHER
    print(f"{traced:9.1%}{off:9.1%}{other:9.1%}{bubble:18}  {'PASS' if passes else 'MISS'}", flush=True)
    if not is_near:
        print(f"{'':6}{'explained: communication took the core' if is_explained else 'not explained'}", flush=True)
    return bool(passes)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="gpt_tiny")
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps")
    parser.add_argument("--only", nargs="*", choices=LAYOUTS, help="default: all")
    return parser.parse_args()


def _measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    size = f"cluster.ranks_per_node={RANKS.get(name, 2)}"
    run = read(f"model={options.model}", *LAYOUTS[name], size, "profile.steps=10", "device=cpu")
    found: dict[str, Any] = on_ranks(run, _in_rank, options.steps)
    return found


def _in_rank(job: Job, pairs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    loop = assemble(job)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(pairs + 3):
        for way in reversed(WAYS) if number % 2 else WAYS:
            taken = _timed(loop, free=way == "free")
            if number >= 3:  # the first ones allocate
                times[way].append(taken)
    mean = float(np.mean([seconds for seconds, _ in times["step"]]))
    phases = profile.phases(job, loop, Metrics(step_seconds=StepSeconds(mean=mean)), profile.Expected())
    of_ranks = gather(times)
    means = {way: np.mean([one[way] for one in of_ranks], axis=0).T.tolist() for way in WAYS}
    found = {kind: {way: means[way][number] for way in WAYS} for number, kind in enumerate(KINDS)}
    return {**found, "phases": to_builtins(phases)}


def _timed(loop: StepLoop, free: bool) -> tuple[float, float]:
    """Seconds of a step, and those in which the thread that computes was on a core."""
    inputs, targets = loop.feed.peek(loop.done)
    dist.barrier()
    with _free_communication() if free else nullcontext():
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
