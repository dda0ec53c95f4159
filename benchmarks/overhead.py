"""What the harness costs: the product's step loop against the same training written by hand.

    make overhead ARGS="steps --parallel ddp"                  # all ranks of this machine, in lockstep
    make overhead ARGS="steps --pairs 200 --model gpt_small"

The three sides (product, bare loop, bare loop again) take turns step by step in one process. Good is a ratio whose
interval ends below 1.01.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rank import on_ranks
from benchmarks.ratio import by_turns, paired_ratio
from benchmarks.script import judged, keep, options, read
from ptdbench.job import Job
from ptdbench.kernels.copies import Copies
from ptdbench.launch.collect import gather
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import module_of
from ptdbench.parallel.precision import DTYPES, cast_inputs
from ptdbench.report.display import Display, Heading
from ptdbench.setup import run_spec
from ptdbench.workloads.train import assemble, steps

#: The upper end of the ratio's interval lies below this.
LIMIT = 1.01

#: The product, and twice what one would write by hand: its ratio to itself shows what this machine can resolve.
SIDES = ("product", "bare", "again")

#: The first turns are not timed: one of each order of the sides.
WARMUP = 6

#: Does the next step and returns its loss on this rank.
Step = Callable[[], Tensor]


def main() -> int:
    """Print both ratios; 1 if the harness costs more than it may."""
    on_gpu = torch.cuda.is_available()
    args = options(
        __doc__,
        pairs=(1000, "steps of each side"),
        model=("gpt_small" if on_gpu else "gpt_tiny", "a choice of conf/model"),
        parallel=("single", "of the ranks", ["single", "ddp"]),
        batch=(12, "samples of a step, all ranks"),
        # Threads that wait for each other turn every disturbance of a shared machine into a much larger one.
        threads=(1, "of a rank"),
        precision=("bf16" if on_gpu else "fp32", "of the model", ["fp32", "bf16"]),
    )
    run = read(
        f"model={args.model}", f"parallel={args.parallel}", f"precision={args.precision}",
        f"train.global_batch={args.batch}", f"train.steps={args.pairs + WARMUP}", "train.max_minutes=null",
        f"cluster.cpus_per_rank={args.threads}",
    )  # fmt: skip
    ranks, seconds = on_ranks(run, _take_turns)
    print(
        f"{args.model} {args.parallel}, world size {ranks}, global batch {args.batch}, {args.precision}: "
        f"{args.pairs} turns, bare step {statistics.median(seconds['bare']) * 1e3:.1f} ms (median)"
    )
    noise, ratio = (paired_ratio(seconds[side], seconds["bare"]) for side in ("again", "product"))
    print(f"  bare / bare     {noise}")
    passed = judged(f"  product / bare  {ratio}", f"upper end below {LIMIT}", ratio.high < LIMIT)
    keep("steps", str(ratio))
    if not (passed or noise.high < LIMIT):
        print("  bare against bare misses it too: this machine is too busy; measure for longer")
    return int(not passed)


def _take_turns(job: Job) -> tuple[int, dict[str, list[float]]]:
    """Take the steps of all three sides by turns in one rank; how many ranks there are, and a step's slowest seconds.

    Raises:
        AssertionError: The sides' losses differ, so that they do not do the same work.
    """
    with Display(Heading("overhead") if job.world.is_first else None, stays=False) as display:
        steps = {"product": _product(replace(job, display=display)), "bare": _bare(job), "again": _bare(job)}
        turns = by_turns(steps, job.spec.config.train.steps, job.device)
        gathered = gather({side: [seconds for seconds, _ in turns[side][WARMUP:]] for side in SIDES})
    for side in SIDES:
        losses = ([loss for _, loss in turns[name][:WARMUP]] for name in (side, "bare"))  # rounding grows later on
        first, bare = (torch.stack(of_side).float() for of_side in losses)
        torch.testing.assert_close(first, bare, rtol=1e-3, atol=0)
    slowest = {side: [max(times) for times in zip(*(rank[side] for rank in gathered), strict=True)] for side in SIDES}
    return job.world.size, slowest


def _product(job: Job) -> Step:
    loop = assemble(job)
    advance = steps(job, loop)

    def step() -> Tensor:
        next(advance)
        return loop.losses[-1]

    return step


def _bare(job: Job) -> Step:
    """Write the same training by hand."""
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
