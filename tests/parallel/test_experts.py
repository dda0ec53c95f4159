"""Experts that ranks share: the numbers of one rank, and what is refused."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.experts import Mixture
from ptdbench.models.moe import MoE
from ptdbench.parallel.activations import Keep, Offload, _Run
from ptdbench.parallel.precision import Name
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.parallel.few_steps import by_engine, by_hand
from tests.parallel.made import laid_out, layout_of, on_meta, refused
from tests.parallel.ranks import each, on_ranks
from tests.refusals import Abridged

SAMPLES = 4

#: By name: the options of a layout on four ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"shard": 4, "expert": 2},
    "replicas": {"replicate": 2, "shard": 2, "expert": 2},
    "context": {"context": 2, "shard": 2, "expert": 4},
    "tensor": {"tensor": 2, "shard": 2, "expert": 4, "sequence": True},
    "tensor without FSDP": {"tensor": 4, "expert": 1},
    "pipeline": {"pipeline": 2, "shard": 2, "expert": 2},
}
KINDS = ("loss", "bias", "forced", "latent", "own router")


class OwnRouter(nn.Module):
    """A user's: it neither counts choices nor balances them."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.positions = nn.Identity()

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        weights, chosen = (tokens.flatten(0, 1) @ self.weight.t()).softmax(-1).topk(2)
        flat = chosen.flatten()
        return weights, flat.argsort(stable=True), flat.bincount(minlength=len(self.weight))


def model(kind: str = "loss") -> MoE:
    """On the meta device; of this balance, or with latent attention and fewer heads of keys for it to overlook."""
    attention = {"head_width": 4, "latent_width": 8, "rotary_width": 4} if kind == "latent" else {}
    balance = kind if kind in ("loss", "bias", "forced") else "loss"
    made: MoE = on_meta(
        MoE, layers=2, heads=4, key_value_heads=1 if attention else 4, width=16, hidden=24, dense_layers=0, experts=4,
        active=2, expert_hidden=8, shared_experts=1, sequence_length=8, vocabulary=20, **attention,
        router={"balance": balance, "coefficient": 0.5, "bias_rate": 0.05},
    )  # fmt: skip
    for mixture in made.modules():
        if isinstance(mixture, Mixture) and kind == "own router":
            mixture.router = OwnRouter(mixture.router.weight)  # type: ignore[assignment]
    return made


def by_layout(layout: str, kind: str, precision: Name = "fp32") -> list[list[float]]:
    setting = {"precision": precision, "activations": Offload() if kind == "offload" else Keep()}
    engine, plan, replica = laid_out(Strategy(**LAYOUTS[layout]), model(kind), SAMPLES, **setting)
    moved: list[Tensor] = []
    offload = _Run._offload
    with mock.patch.object(_Run, "_offload", lambda run, tensor: moved.append(tensor) or offload(run, tensor)):
        numbers = by_engine(engine, plan, replica)
    assert (len(moved) > 100) == (kind == "offload")
    # Not what FSDP gathers, and frees before the backward pass, that of experts in the middle of a layer.
    assert all(tensor.untyped_storage().nbytes() for tensor in moved if tensor.numel())
    for routing in (part.routing for part in engine.parts if kind == "forced" and part.routing):
        computed = torch.tensor(routing._loads).view(len(numbers), -1)
        assert (computed == computed[0]).all()  # whatever the first pass of a pipeline begins with
    if kind == "own router":
        assert engine.routed() == ({}, [])
    return numbers


#: Layout, kind and precision.
CASES = [
    *((layout, "loss", "fp32") for layout in LAYOUTS),
    ("context", "forced", "fp32"), ("tensor", "forced", "fp32"), ("pipeline", "forced", "fp32"),
    ("shards", "bias", "fp32"), ("shards", "own router", "fp32"),
    *((layout, "latent", "fp32") for layout in ("context", "tensor", "tensor without FSDP")),
    ("shards", "offload", "fp32"), ("tensor", "offload", "fp32"),
    *((layout, "loss", "bf16") for layout in LAYOUTS),
]  # fmt: skip


@pytest.fixture(scope="module")
def of_first(request: pytest.FixtureRequest) -> dict[tuple[str, ...], list[list[float]]]:
    return on_ranks(4, each, by_layout, sorted(selected(request, "case")))[0]


@cache
def expected(kind: str) -> list[list[float]]:
    return by_hand(model(kind), SAMPLES)


@pytest.mark.ranks
@cases("case", CASES, daily=[
    *CASES[:7], ("pipeline", "forced", "fp32"),
    ("shards", "bias", "fp32"), ("shards", "own router", "fp32"), ("tensor", "latent", "fp32"),
    ("shards", "loss", "bf16"),
    ("shards", "offload", "fp32"), ("tensor", "offload", "fp32"),
    ("tensor without FSDP", "loss", "bf16"),
], ids=str)  # fmt: skip
def test_layouts_follow_one_rank(of_first, case):
    _, kind, precision = case
    steps = expected("loss" if kind == "offload" else kind)
    assert (of_first[case] == [pytest.approx(step, rel=1e-5) for step in steps]) == (precision == "fp32")
    assert of_first[case] == [pytest.approx(step, rel=2e-2) for step in steps]


def test_no_two_kinds_have_the_same_losses():
    assert len({expected(kind)[-1][0] for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize(("options", "message"), [
    ({"shard": 8, "expert": 8}, "expert=8: must divide the 4 experts of the model; try 2, 4"),
    ({"shard": 6, "expert": 2}, "expert=2: leaves 3 replicas …, which must divide the 16 rows …; try another …"),
])  # fmt: skip
def test_indivisible_experts_are_refused(options, message):
    strategy = Strategy(**options)
    assert refused(strategy.check, model(), layout_of(strategy, options["shard"], 48)) == Abridged(message)


def test_derived_degree_divides_experts():
    degrees = [Strategy(shard="auto", expert="auto").dims(ranks, model()).expert for ranks in (1, 2, 4, 6, 16)]
    assert degrees == [1, 2, 4, 2, 4]
