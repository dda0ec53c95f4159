"""Levers of replication and sharding: six steps of AdamW, clipped, against those of one process."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ptdbench.models.gpt import GPT
from ptdbench.optim.schedules import OneCycle
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.engine import Accumulating, Engine, LaidOutModule
from ptdbench.parallel.replicas import assign_owners
from ptdbench.parallel.strategy import Strategy
from ptdbench.training.loop import StepLoop
from tests.daily import cases, selected
from tests.parallel.made import data, gpt, laid_out, whole, with_weights
from tests.parallel.ranks import on_ranks
from tests.workloads.made_loop import step_loop

pytestmark = pytest.mark.ranks

RANKS, BATCH, STEPS = 4, 16, 6
TRAIN = {"clip_norm": 0.2, "steps": STEPS}


class Lever:
    def __init__(self, micro_batch: int | str = "auto", offload: str = "none", **strategy: Any) -> None:
        self.strategy = Strategy(**strategy)
        self.micro_batch = micro_batch
        self.offload = offload


#: They do not change the numbers.
LEVERS = {
    "zero1": Lever(replicate="auto", optimizer="zero1"),
    "zero1, accumulated": Lever(replicate="auto", optimizer="zero1", micro_batch=1),
    "zero1, stages": Lever(replicate="auto", pipeline=2, microbatches=4, optimizer="zero1"),
    "zero1, small buckets": Lever(replicate="auto", optimizer="zero1", bucket_mb=0.001),
    "reshard 2, accumulated": Lever(shard="auto", reshard_after_forward=2, micro_batch=1),
    "reduced each, kept": Lever(shard="auto", reshard_after_forward=False, micro_batch=1,
                                reduce_scatter_each_microbatch=True),
    "reduced each, hsdp": Lever(replicate=2, shard="auto", micro_batch=2, reduce_scatter_each_microbatch=True),
    "prefetch 9, hsdp": Lever(replicate=2, shard="auto", prefetch=9, micro_batch=2),
    "prefetch 2, reshard 2": Lever(shard="auto", prefetch=2, reshard_after_forward=2),
    "prefetch 2, stages": Lever(shard="auto", pipeline=2, microbatches=4, prefetch=2),
    "offload, accumulated": Lever(shard="auto", offload="optimizer_and_weights", micro_batch=1, prefetch=2),
    "offload, reduced each": Lever(shard="auto", offload="optimizer_and_weights", micro_batch=2,
                                   reduce_scatter_each_microbatch=True),
    "offload, hsdp": Lever(replicate=2, shard="auto", offload="optimizer_and_weights"),
    "offload, stages": Lever(shard="auto", pipeline=2, microbatches=4, offload="optimizer_and_weights"),
}  # fmt: skip


def uneven() -> GPT:
    """Of widths that no number of shards divides, with a head that is the embedding."""
    return gpt(heads=1, width=13, vocabulary=41)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def loop_of(engine: Engine, layout: BatchPlan, replica: int) -> StepLoop:
    return step_loop(engine, engine.optimizer(adamw), data(41), layout, replica, schedule=OneCycle(), **TRAIN)


def loop_under(lever: Lever, seed: int = 0) -> StepLoop:
    return loop_of(*laid_out(lever.strategy, uneven(), BATCH, lever.micro_batch, seed=seed, offload=lever.offload))


def train(loop: StepLoop, steps: int = STEPS) -> list[float]:
    before = len(loop.losses)
    for _ in range(steps):
        loop.step()
    return [loss.item() for loss in loop.losses[before:]]


def in_rank(folder: Path, names: set[str]) -> dict[str, Any]:
    """What each lever of these names trains, and what the one process does that it is held against."""
    plain = with_weights(uneven())
    reference = loop_of(Accumulating(LaidOutModule(plain, plain), BATCH), BatchPlan(Dims(), BATCH, BATCH), 0)
    seen = {"one process": outcome(reference)} | {name: outcome(loop_under(LEVERS[name])) for name in sorted(names)}
    return seen


def outcome(loop: StepLoop) -> dict[str, Any]:
    losses = train(loop)
    weights = {name: whole(weight) for name, weight in loop.engine.module.named_parameters()}
    outcomes = {
        "losses": losses, "owns_loss": loop.engine.owns_loss, "norms": [float(n) for n in loop.update.gradient_norms],
        "state": sum(len(values) > 0 for values in loop.update.optimizer.state.values()),
    }  # fmt: skip
    assert all(torch.equal(weights[name], whole(weight)) for name, weight in loop.engine.module.named_parameters())
    return outcomes | {"weights": weights}


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(RANKS, in_rank, tmp_path_factory.mktemp("levers"), selected(request, "name"))


@cache
def tied() -> dict[str, str]:
    return {other: first for first, other in uneven().tied()}


def losses_of(of_ranks: list[dict[str, Any]], name: str) -> list[float]:
    owners = [of_rank[name]["losses"] for of_rank in of_ranks if of_rank[name]["owns_loss"]]
    return [sum(step) / len(owners) for step in zip(*owners, strict=True)]


@cases("name", LEVERS, daily=["zero1, accumulated", "reshard 2, accumulated", "prefetch 2, stages", "offload, hsdp"])
def test_exact_levers_follow_one_process(of_ranks, name):
    process = of_ranks[0]["one process"]
    assert losses_of(of_ranks, name) == pytest.approx(process["losses"], rel=1e-5)
    for of_rank in (of_rank[name] for of_rank in of_ranks):
        assert of_rank["norms"] == pytest.approx(process["norms"], rel=1e-4)
        for weight, value in of_rank["weights"].items():
            expected = process["weights"][tied().get(weight, weight)]
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4, msg=weight)


def test_clipping_and_steps_matter(of_ranks):
    process = of_ranks[0]["one process"]
    assert min(process["norms"]) > TRAIN["clip_norm"]
    first, *later = process["losses"]
    assert max(abs(loss / first - 1) for loss in later) > 1e-3  # a hundred times the tolerance


@cases("name", [name for name in LEVERS if "zero1" in name], daily=["zero1, accumulated"])
def test_zero1_divides_the_state(of_ranks, name):
    weights = len(list(uneven().parameters()))
    if LEVERS[name].strategy.pipeline == 1:
        assert sum(of_rank[name]["state"] for of_rank in of_ranks) == weights
        for of_rank in of_ranks[1:]:
            for weight, value in of_rank[name]["weights"].items():
                assert torch.equal(value, of_ranks[0][name]["weights"][weight])
    assert all(0 < of_rank[name]["state"] < weights for of_rank in of_ranks)


@pytest.mark.parametrize(
    ("sizes", "replicas", "owners"),
    [([1, 5, 3, 3], 2, [0, 0, 1, 1]), ([4, 4, 4], 3, [0, 1, 2]), ([2], 4, [0]), ([], 4, [])],
)
def test_owners_balance_elements(sizes, replicas, owners):
    assert assign_owners(sizes, replicas) == owners
