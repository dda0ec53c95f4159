"""Every schedule of a pipeline computes what one rank does, alone and with replicas or shards."""

from functools import cache, partial
from itertools import product as combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import materialize
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.engine import Accumulating, LaidOutModule
from ptdbench.parallel.pipeline.schedules import SCHEDULES
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.parallel.ranks import mesh_of, on_ranks
from tests.workloads.made_loop import step_loop

STEPS, BATCH, CLIP = 4, 16, 0.1
CPU = torch.device("cpu")
SHAPE = {"layers": 8, "heads": 2, "width": 16, "sequence_length": 8, "vocabulary": 40}
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SEVERAL = [name for name, one in SCHEDULES.items() if one.stages != 1 and one.is_supported]
#: Degrees on four ranks beside a pipeline of two, or a pipeline of four.
PRODUCTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicate": 2, "pipeline": 2},
    "shards": {"shard": 2, "pipeline": 2, "reshard_after_forward": False},
    "resharded": {"shard": 2, "pipeline": 2},
    "alone": {"pipeline": 4},
}

Case = tuple[str, str, bool]  # a schedule, a product, and whether weights are tied, with accumulation then


def products() -> list[Case]:
    found = list(combinations(SEVERAL, ("replicas", "shards"), (True, False)))
    found += [(schedule, "resharded", True) for schedule in SEVERAL if not SCHEDULES[schedule].splits_backward]
    return found + [(schedule, "alone", True) for schedule in SEVERAL]


def gpt(tied: bool) -> GPT:
    with torch.device("meta"):
        return GPT(**SHAPE, tie_weights=tied)


def data() -> SyntheticTokens:
    return SyntheticTokens(sequence_length=8, vocabulary=40, seed=0)


@cache
def reference(tied: bool) -> dict[str, Any]:
    """One rank."""
    model = gpt(tied)
    materialize(model, model, device=CPU, seed=0)
    layout = BatchPlan(Dims(), BATCH, BATCH)
    with torch.no_grad():
        untrained = model(*data().samples(*layout.rows(STEPS - 1, 0))).item()
    engine = Accumulating(LaidOutModule(model, model), BATCH)
    loop = step_loop(engine, engine.optimizer(ADAMW), data(), layout, clip_norm=CLIP)
    for _ in range(STEPS):
        loop.step()
    losses = [loss.item() for loss in loop.losses]
    assert abs(losses[-1] / untrained - 1) > 1e-3  # a hundred times the tolerance: wrong gradients would show
    norms = [norm.item() for norm in loop.update.gradient_norms]
    assert min(norms) > CLIP
    with torch.no_grad():
        return {"losses": losses, "norms": norms, "outputs": model(data().samples(0, 3)[0])}


def trained(case: Case) -> dict[str, Any]:
    """In a rank: what is left of the steps."""
    schedule, product, tied = case
    microbatches: Any = 4 if tied and product != "alone" else "auto"
    strategy = Strategy(**PRODUCTS[product], schedule=schedule, microbatches=microbatches)
    layout = strategy.layout(strategy.dims(dist.get_world_size()), BATCH, 1)
    assert layout.accumulation == (2 if tied and product != "alone" else 1)
    mesh, model = mesh_of(layout.dims), gpt(tied)
    strategy.check(model, layout)
    engine = strategy(model, Setting(mesh, layout, CPU))
    replica = mesh.batch.get_local_rank()
    loop = step_loop(engine, engine.optimizer(ADAMW), data(), layout, replica, clip_norm=CLIP)
    evaluated_first = engine.outputs(data().samples(0, 3)[0])
    loop.rehearse()
    for _ in range(STEPS):
        loop.step()
    weights = dict(engine.module.named_parameters())
    ends = [whole(weights[name]) for name in ("embedding.token.weight", "head.projection.weight") if name in weights]
    return {
        "losses": [loss.item() for loss in loop.losses], "owns_loss": engine.owns_loss,
        "norms": [norm.item() for norm in loop.update.gradient_norms], "ends": ends,
        "outputs": engine.outputs(data().samples(0, 3)[0]), "first": evaluated_first is not None,
    }  # fmt: skip


def whole(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def all_trained(some: list[Case]) -> dict[Case, dict[str, Any]]:
    return {case: trained(case) for case in some}


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[Case, dict[str, Any]]]:
    return on_ranks(4, all_trained, [case for case in products() if case in selected(request, "case")])


@pytest.mark.ranks
@cases("case", products(), daily=[("interleaved1f1b", "replicas", True), ("looped_bfs", "shards", False)], ids=str)
def test_steps_follow_one_rank(of_ranks, case):
    seen, expected = [of_rank[case] for of_rank in of_ranks], reference(case[2])
    owners = [of_rank for of_rank in seen if of_rank["owns_loss"]]
    assert len(owners) == (1 if case[1] == "alone" else 2)
    losses = torch.tensor([of_rank["losses"] for of_rank in owners]).mean(dim=0)
    assert losses.tolist() == pytest.approx(expected["losses"], rel=1e-5)
    for of_rank in seen:
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert (of_rank["outputs"] is not None) == of_rank["first"] == of_rank["owns_loss"]
    for of_rank in owners:
        torch.testing.assert_close(of_rank["outputs"], expected["outputs"], rtol=1e-4, atol=1e-5)
    if case[2]:
        ends = [weight for of_rank in seen for weight in of_rank["ends"]]
        assert all(torch.equal(weight, ends[0]) for weight in ends)


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", [0, 1, 2]), ("looped_bfs", [0, 1, 2, 0, 1, 2]), ("zbv", [0, 1, 2, 2, 1, 0])]
)
def test_stages_lie_in_a_loop_or_a_v(name, ranks):
    schedule = SCHEDULES[name]
    assert schedule.ranks(3, schedule.per_rank("auto")) == ranks


@pytest.mark.parametrize(
    ("name", "bubble"),
    # of 4 ranks and 8 micro-batches, by hand: the idle part of what the longest rank takes
    [
        ("gpipe", 3 / 11),
        ("1f1b", 3 / 11),
        ("interleaved1f1b", 1.5 / 9.5),
        ("interleaved_zero_bubble", 1.5 / 25.5),
        ("zbv", 0),
        ("dualpipev", 3 / 27),
    ],
)
def test_the_bubble_of_a_schedule(name, bubble):
    schedule = SCHEDULES[name]
    assert schedule.bubble(4, schedule.per_rank("auto"), 8) == pytest.approx(bubble)
