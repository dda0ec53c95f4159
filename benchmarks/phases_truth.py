"""The phases of the profiler against steps with free communication.

    make overhead ARGS="phases --model gpt_small --steps 20 --rows ddp fsdp"

Exposed communication as a share of the step, the mean over ranks: by the difference to steps whose communication
completes at once and moves nothing, by the trace, and by the time in which the compute thread is off its core, beyond a
free step's. Good is a trace within 5 points of the difference, or explained by the time off core, and at most 5 % of a
step in no phase.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import to_builtins
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from benchmarks.cells import Matrix, refusal
from benchmarks.rank import on_ranks
from benchmarks.ratio import by_turns, paired_ratio
from benchmarks.script import keep, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.records.schema import Metrics, StepSeconds
from ptdbench.training import profile
from ptdbench.training.loop import StepLoop
from ptdbench.workloads.train import assemble

#: Largest difference of the two shares, and the largest share of a rank's step in no phase.
POINTS, MOST_OTHER = 0.05, 0.05

MATRIX = Matrix.load("phases")

OPERATIONS = (
    "allreduce_", "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "alltoall_base_", "broadcast_", "send", "recv_",
)  # fmt: skip

#: The first pairs of steps, which allocate.
WARMUP = 3

#: The phases in which a rank waits for others.
WAITS = ("communication", "stragglers", "bubble")


def main() -> int:
    """Print a row for each layout; return 1 if one misses."""
    args = MATRIX.options(__doc__, model=("gpt_tiny", "a choice of conf/model"), steps=(40, "pairs of steps"))
    headings = "".join(f"{name:>9}" for name in ("trace", "off core", "other", "bubble", "formula"))
    print(f"{'':27}{'step':>8}{'free':>9}{'by difference':>22}{headings}")
    configs = {row: read(*MATRIX.words(row, "plain"), f"model={args.model}") for row in args.rows}
    supported = {row: config for row, config in configs.items() if not refusal(config)}  # torch may lack a schedule
    passed = sum(_passes(row, on_ranks(config, _in_rank, args.steps)) for row, config in supported.items())
    keep("phases", f"{passed} of {len(supported)} pass")
    return int(passed < len(supported))


def _passes(name: str, figures: Mapping[str, Any]) -> bool:
    """Print the row of a layout, and return whether it is as required."""
    phases, (seconds, cpu_seconds) = figures["phases"], figures["step"]
    free_seconds, free_cpu_seconds = figures["free"]
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
    """Return the phases, and for both kinds of steps the seconds and CPU seconds of each, the mean over ranks."""
    torch.set_num_threads(1)
    loop = assemble(job)
    sides = {"step": partial(_timed, loop, False), "free": partial(_timed, loop, True)}
    turns = by_turns(sides, pairs + WARMUP, job.device)
    times = {kind: [seconds for _, seconds in of_kind[WARMUP:]] for kind, of_kind in turns.items()}
    mean = Metrics(step_seconds=StepSeconds(mean=float(np.mean([seconds for seconds, _ in times["step"]]))))
    phases, of_ranks = profile.phases(job, loop, mean), gather(times)
    return {
        "phases": to_builtins(phases),
        **{kind: np.mean([rank[kind] for rank in of_ranks], axis=0).T.tolist() for kind in times},
    }


def _timed(loop: StepLoop, is_free: bool) -> tuple[float, float]:
    """Return the seconds of a step, and those in which the compute thread was on a core."""
    inputs, targets = loop.feed.peek(loop.done)
    dist.barrier()
    with _free_communication() if is_free else nullcontext():
        began = time.perf_counter(), time.thread_time()
        loop.engine.gradients(inputs, targets, loop.update.scale)
        loop.update(0)
        return time.perf_counter() - began[0], time.thread_time() - began[1]


@contextmanager
def _free_communication() -> Iterator[None]:
    """Have communication complete at once and move nothing."""
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATIONS:
        gives_tensors = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1
        library.impl(name, partial(_done, gives_tensors), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _done(gives_tensors: bool, tensors: Any, *_: Any) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
    work = _create_work_from_future(future).boxed()
    return (tensors, work) if gives_tensors else work
