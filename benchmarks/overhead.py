"""What the harness costs: the product's step loop against the same training written by hand.

    python benchmarks/overhead.py                          # one rank
    python benchmarks/overhead.py --parallel ddp           # all ranks of this machine, in lockstep
    python benchmarks/overhead.py --pairs 200 --model gpt_small

The product's side is what ``workload=train`` does from one step to the next: the clock, the step, memory, garbage
collection and what the display is told (the one that is shown while this runs). The bare side is forward, backward,
``optimizer.step()`` and ``zero_grad()`` over the same model and data. The bare loop runs twice, so that its ratio to
itself shows what this machine can resolve. The three take turns step by step in one process, in every order equally
often; each is timed from outside, and a step costs what its slowest rank took. On a terminal another thread redraws the
line beside all three sides alike, so that a redraw is timed by itself.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rank import on_ranks
from benchmarks.ratio import ORDERS, SIDES, against_bare, in_turns, paired_ratio
from benchmarks.script import parser_of, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import module_of
from ptdbench.parallel.precision import DTYPES, Copies, cast_inputs
from ptdbench.report.display import REDRAW_SECONDS, Display, Heading, Line, Live
from ptdbench.setup import run_spec
from ptdbench.workloads.train import assemble, steps

#: The upper end of the ratio's interval lies below this.
LIMIT = 1.01

#: Does the next step and returns its loss on this rank.
Step = Callable[[], Tensor]


def main() -> int:
    """Print both ratios; 1 if the harness costs more than it may."""
    options = _parse()
    ranks, seconds = on_ranks(read(*_overrides(options)), _take_turns)
    print(
        f"{options.model} {options.parallel}, world size {ranks}, global batch {options.batch}, {options.precision}: "
        f"{options.pairs} turns, bare step {statistics.median(seconds['bare']) * 1e3:.1f} ms (median)"
    )
    passed = against_bare(
        seconds, paired_ratio, lambda ratio: ratio.high < LIMIT, f"upper end below {LIMIT}", "--pairs"
    )
    redraw = _redraw_seconds()
    print(f"  live line       {redraw * 1e3:.2f} ms a redraw, {redraw / REDRAW_SECONDS:.2%} of one core")
    return int(not passed)


def _take_turns(job: Job) -> tuple[int, dict[str, list[float]]]:
    """One rank: all three sides by turns; how many ranks there are, and seconds of each step on its slowest rank.

    Raises:
        AssertionError: The sides' losses differ, so that they do not do the same work.
    """
    losses: dict[str, list[Tensor]] = defaultdict(list)

    def timed(side: str, step: Step) -> float:
        started = time.perf_counter()
        loss = step()
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        seconds = time.perf_counter() - started
        losses[side].append(loss)
        return seconds

    warmup = len(ORDERS)
    with Display(Heading("overhead") if job.world.is_first else None, stays=False) as display:
        steps = {"product": _product(replace(job, display=display)), "bare": _bare(job), "again": _bare(job)}
        sides = {side: partial(timed, side, step) for side, step in steps.items()}
        gathered = gather(in_turns(sides, job.spec.config.train.steps - warmup, warmup))
    for side in SIDES:
        first, bare = (torch.stack(losses[one][:warmup]).float() for one in (side, "bare"))  # rounding grows later on
        torch.testing.assert_close(first, bare, rtol=1e-3, atol=0)
    slowest = {side: [max(times) for times in zip(*(one[side] for one in gathered), strict=True)] for side in SIDES}
    return job.world.size, slowest


def _redraw_seconds(times: int = 500) -> float:
    """What one redraw of the line takes, its mean."""
    steps = iter(range(2 * times))

    def line(width: int) -> Line:
        return Line(f"gpt_tiny ddp  step {next(steps)}/{2 * times}", "23,868 tokens/s  loss 4.8700  0:41 left", 1, 2)

    with Live(io.StringIO(), line) as live:
        started = time.thread_time()
        for _ in range(times):
            live.refresh()
        return (time.thread_time() - started) / times


def _product(job: Job) -> Step:
    loop = assemble(job)
    advance = steps(job, loop)

    def step() -> Tensor:
        next(advance)
        return loop.losses[-1]

    return step


def _bare(job: Job) -> Step:
    """The same training as one would write it by hand."""
    world, device = job.world, job.device
    spec = run_spec.specify(job.spec.config, world).training  # a model of its own
    assert spec
    model = module_of(spec.model)
    materialize(spec.model, model, device=device, seed=spec.config.general.seed)
    precision = spec.config.general.precision
    cast_inputs(model, (), precision)
    if DTYPES[precision] != torch.float32:
        Copies(model, spec.model.layers(), DTYPES[precision])
    optimizer = spec.optimizer(model.named_parameters())
    forward: nn.Module = model
    if world.size > 1:
        # conf/parallel/ddp.yaml; a bucket size that is given, be it torch's own, does away with a smaller first bucket.
        forward = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True, static_graph=True)
    rows = (spec.layout.rows(number, world.rank) for number in range(spec.config.train.steps))

    def step() -> Tensor:
        inputs, targets = (tensor.to(device) for tensor in spec.data.samples(*next(rows)))
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _overrides(options: argparse.Namespace) -> list[str]:
    return [
        f"model={options.model}",
        f"parallel={options.parallel}",
        f"precision={options.precision}",
        f"train.global_batch={options.batch}",
        f"train.steps={options.pairs + len(ORDERS)}",
        "train.max_minutes=null",
        f"cluster.cpus_per_rank={options.threads}",
    ]


def _parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=1000, help="steps of each side (default: %(default)s)")
    parser.add_argument(
        "--model",
        default="gpt_small" if on_gpu else "gpt_tiny",
        help="a choice of conf/model (default: %(default)s)",
    )
    parser.add_argument("--parallel", choices=["single", "ddp"], default="single", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=12, help="samples of a step, all ranks (default: %(default)s)")
    # Threads that wait for each other turn every disturbance of a shared machine into a much larger one.
    parser.add_argument("--threads", type=int, default=1, help="of a rank (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="bf16" if on_gpu else "fp32",
        help="default: %(default)s",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
