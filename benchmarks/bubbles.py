"""The idle share of each pipeline schedule against its formula, with stages that sleep instead of computing.

    python benchmarks/bubbles.py
    python benchmarks/bubbles.py --ranks 2 --microbatches 6 --milliseconds 60 --only zbv 1f1b

Each rank sleeps for the same time ``t`` a micro-batch in the forward pass, for the gradient of its input and for the
gradient of its weights; several stages on a rank share it. The model is laid out and run by the product's own strategy
and engine. A rank's span goes from its first sleep of a step to the end of its last; the idle share is the part of the
longest span of all ranks in which that rank did not sleep, in the best of several steps. The machine must have time to
wake a rank when it is due: on a busy one, take longer sleeps.

The formulas are those of :class:`ptdbench.parallel.pipeline.schedules.Schedule`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

from benchmarks.rank import on_ranks
from benchmarks.script import judged, parser_of, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.models.protocol import Role
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.pipeline.schedules import SCHEDULES
from ptdbench.parallel.strategy import Strategy

#: How far a measured share may be from its formula, as a part of the step.
TOLERANCE = 0.05

#: When this rank began and ended to sleep, in seconds.
SLEPT: list[tuple[float, float]] = []


def main() -> int:
    """Print the figures; 1 if one misses its formula."""
    options = _parse()
    ranks, microbatches, seconds = options.ranks, options.microbatches, options.milliseconds / 1000
    print(f"{ranks} ranks, {microbatches} micro-batches, 3 x {options.milliseconds:g} ms each")
    # Any run of so many ranks: what they carry out is not its model.
    size = (f"cluster.ranks_per_node={ranks}", f"train.global_batch={ranks}")
    run = read("model=toy", "parallel=ddp", "device=cpu", *size)
    passed = []
    for name, of_ranks in on_ranks(run, _measure, options.only, microbatches, seconds, options.steps).items():
        steps = [max(of_step) for of_step in zip(*of_ranks, strict=True)]
        found = min(1 - slept / span for span, slept in steps)
        expected = SCHEDULES[name].bubble(ranks, SCHEDULES[name].per_rank("auto"), microbatches)
        if expected is None:
            print(f"  {name:24} idle {found:6.1%}, no formula for so few micro-batches")
            continue
        told = f"  {name:24} idle {found:6.1%}, formula {expected:6.1%}"
        passed.append(judged(told, f"within {TOLERANCE:.0%}", abs(found - expected) <= TOLERANCE))
    return int(not all(passed))


def _measure(
    job: Job, names: list[str], microbatches: int, seconds: float, steps: int
) -> dict[str, list[list[tuple[float, float]]]]:
    """In a rank: the span and the sleep of each rank in each step under each schedule, in seconds."""
    torch.set_num_threads(1)
    ranks, found = job.world.size, {}
    for name in names:
        strategy = Strategy(pipeline=ranks, schedule=name, microbatches=microbatches)  # type: ignore[arg-type]
        layout = strategy.layout(strategy.dims(ranks), microbatches, 1)
        with torch.device("meta"):
            model = Sleepers(2 * ranks, seconds / 2)
        engine = strategy(model, Setting(Mesh(layout.dims, "cpu"), layout, torch.device("cpu")))
        seen = []
        for _ in range(1 + steps):  # the first one infers shapes
            dist.barrier()
            SLEPT.clear()
            engine.gradients(torch.ones(microbatches, 1), torch.ones(microbatches, 1), lambda loss: loss)
            slept = sum(end - start for start, end in SLEPT)
            seen.append((SLEPT[-1][1] - SLEPT[0][0], slept))
        found[name] = gather(seen[1:])
    return found


class Sleepers(nn.Module):
    """A chain of equal layers, each of which sleeps for ``seconds`` forward and twice as long backward."""

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.chain = nn.ModuleList(Sleeper(seconds, is_last=number == layers - 1) for number in range(layers))

    def layers(self) -> list[nn.Module]:
        """All of it."""
        return list(self.chain)

    def parts(self) -> dict[str, nn.Module]:
        """A part for each layer."""
        return {f"chain.{number}": layer for number, layer in enumerate(self.chain)}

    def roles(self) -> dict[str, Role]:
        """None."""
        return {}

    def train_flops(self) -> dict[str, float]:
        """All cost the same."""
        return dict.fromkeys(self.parts(), 1.0)

    def tied(self) -> list[tuple[str, str]]:
        """None."""
        return []

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """With ones."""
        nn.init.ones_(tensor)


class Sleeper(nn.Module):
    """A product with a weight; the gradients of input and weight cost a sleep each."""

    def __init__(self, seconds: float, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self._sleep = partial(_sleep, seconds)
        self._is_last = is_last

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Numbers, or with targets a scalar."""
        self._sleep()
        # On the way from the outputs to the input, and on the way from there to the weight.
        y: Tensor = _Backward.apply(x * _Backward.apply(self.weight, self._sleep), self._sleep)
        return y if targets is None else y.mean()


class _Backward(torch.autograd.Function):
    """The identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Any) -> Tensor:
        ctx.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        ctx.sleep()
        return gradients[0], None


def _sleep(seconds: float) -> None:
    start = time.monotonic()
    time.sleep(seconds)
    SLEPT.append((start, time.monotonic()))


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step; at least twice as many as ranks")
    parser.add_argument(
        "--milliseconds", type=float, default=300, help="a rank sleeps three times as long a micro-batch"
    )
    parser.add_argument("--steps", type=int, default=3)
    supported = [name for name, schedule in SCHEDULES.items() if schedule.is_supported]
    parser.add_argument("--only", nargs="+", choices=supported, default=supported)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
