"""Bytes by formula, against what ranks have really sent in a step, and hold after it."""

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _add_unshard_reshard

from ptdbench.data.synthetic import SyntheticImages, SyntheticTokens
from ptdbench.local_part import local_part
from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Llama
from ptdbench.models.moe import MoE
from ptdbench.models.resnet import ResNet
from ptdbench.parallel.activations import Recompute
from ptdbench.parallel.comm_volume import OPERATIONS, CommModel, comm_bytes
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.footprint import StateBytes, footprints
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.optim.made_muon import muon_of
from tests.parallel.made import calls_of, data, gpt, laid_out, layout_of, on_meta, unscaled
from tests.parallel.ranks import each, on_ranks
from tests.parallel.splitting import where_split
from tests.parallel.test_experts import model

BATCH = 8

#: By name: the strategy, samples of a micro-batch, and what else differs. Four shards of some weights are not equal.
CASES: dict[str, tuple[Strategy, dict[str, Any]]] = {
    "ddp": (Strategy(replicate="auto"), {}),
    "ddp in bf16": (Strategy(replicate="auto", gradients="bf16"), {"micro_batch": 1, "precision": "bf16"}),
    "images": (Strategy(replicate="auto"), {"micro_batch": 1}),
    "images in shards": (Strategy(shard="auto"), {"precision": "bf16"}),
    "zero1": (Strategy(replicate="auto", optimizer="zero1"), {}),
    "zero1 by muon": (Strategy(replicate="auto", optimizer="zero1"), {"muon": True}),
    "zero1 of two stages a rank": (
        Strategy(replicate="auto", pipeline=2, schedule="looped_bfs", microbatches=2, optimizer="zero1"), {}
    ),
    "fsdp": (Strategy(shard="auto"), {"micro_batch": 1}),
    "fsdp by muon": (Strategy(shard="auto"), {"muon": True}),
    "ddp by muon": (Strategy(replicate="auto"), {"muon": True}),
    "tensor by muon": (Strategy(shard="auto", tensor=2), {"muon": True}),
    "fsdp in bf16": (Strategy(shard="auto", gradients="bf16"), {"micro_batch": 1, "precision": "bf16"}),
    "fsdp that keeps weights": (Strategy(shard="auto", reshard_after_forward=False), {"micro_batch": 1}),
    "fsdp that keeps them between passes": (Strategy(shard="auto", reshard_between_microbatches=False),
                                            {"micro_batch": 1}),
    "fsdp that keeps them in a pass": (
        Strategy(shard="auto", reshard_after_forward=False, reshard_between_microbatches=True), {"micro_batch": 1}),
    "fsdp that reduces each": (Strategy(shard="auto", reduce_scatter_each_microbatch=True), {"micro_batch": 1}),
    "tensor that reduces each": (
        Strategy(shard="auto", tensor=2, sequence=True, reduce_scatter_each_microbatch=True), {"micro_batch": 2}),
    "hsdp that reduces each": (
        Strategy(replicate=2, shard="auto", reduce_scatter_each_microbatch=True), {"micro_batch": 1}),
    "fsdp by torch": (Strategy(shard="auto"), {"micro_batch": 1, "precision": "bf16", "kernels": "torch"}),
    "tensor by torch": (Strategy(shard="auto", tensor=2), {"micro_batch": 1, "precision": "bf16", "kernels": "torch"}),
    "context by torch": (Strategy(replicate="auto", context=2), {"precision": "bf16", "kernels": "torch"}),
    "fsdp that gathers ahead": (Strategy(shard="auto", prefetch=2), {"micro_batch": 1}),
    "fsdp in groups": (Strategy(shard="auto", reshard_after_forward=2), {}),
    "fsdp that recomputes": (Strategy(shard="auto"), {"activations": Recompute()}),
    "hsdp": (Strategy(replicate=2, shard="auto"), {}),
    "pdp": (Strategy(replicate="auto", pipeline=2, microbatches=2), {"micro_batch": 1}),
    "pdp by muon": (Strategy(replicate="auto", pipeline=2, microbatches=2), {"muon": True}),
    "gpipe in bf16": (Strategy(replicate=2, pipeline=2, schedule="gpipe", microbatches=2), {"precision": "bf16"}),
    "stages with a frozen weight in common": (Strategy(replicate=2, pipeline=2, microbatches=2), {}),
    "stages in shards": (Strategy(shard="auto", pipeline=2, microbatches=2), {"micro_batch": 1}),
    "stages of two layers in shards": (Strategy(shard="auto", pipeline=2, microbatches=2), {"micro_batch": 1}),
    "stages that keep weights": (
        Strategy(shard="auto", pipeline=2, microbatches=2, reshard_after_forward=False), {"micro_batch": 1}
    ),
    **where_split({
        "both ends on a rank": lambda: (
            Strategy(replicate=2, pipeline=2, schedule="dualpipev", microbatches=4), {}
        ),
    }),
    "tensor": (Strategy(replicate="auto", tensor=2), {"micro_batch": 1}),
    "tensor and shards": (Strategy(shard="auto", tensor=2, sequence=True), {"micro_batch": 2}),
    "tensor and stages": (Strategy(tensor=2, pipeline=2, microbatches=2), {"precision": "bf16"}),
    "positions and stages": (Strategy(tensor=2, pipeline=2, microbatches=2, sequence=True), {}),
    "context and shards": (Strategy(shard=2, context=2), {"micro_batch": 1, "precision": "bf16"}),
    "ring and shards": (Strategy(shard=2, context=2, context_method="ring"), {"micro_batch": 1, "precision": "bf16"}),
    "ring and tensor": (Strategy(context=2, tensor=2, context_method="ring"), {}),
    "ring that recomputes": (Strategy(context=4, context_method="ring"), {"activations": Recompute()}),
    "llama with a ring": (Strategy(shard=2, context=2, context_method="ring"), {}),
    "context and tensor": (Strategy(context=2, tensor=2), {}),
    "context that sends bf16": (Strategy(context=4, gradients="bf16", optimizer="zero1"), {}),
    "context that recomputes": (Strategy(replicate=2, context=2), {"activations": Recompute()}),
    "llama in bf16": (Strategy(shard="auto", tensor=2), {"precision": "bf16"}),
    "llama with context": (Strategy(shard=2, context=2), {}),
    "experts in turn": (Strategy(shard="auto", expert=2), {"micro_batch": 1}),
    "experts in turn and stages": (Strategy(shard=2, expert=2, pipeline=2), {"precision": "bf16"}),
    "experts in turn, positions and stages": (
        Strategy(pipeline=2, tensor=2, expert=2, sequence=True, microbatches=2), {"micro_batch": 1}
    ),
    "experts in turn and context": (Strategy(shard=2, context=2, expert=4), {}),
    "experts chosen": (Strategy(shard="auto", expert=4), {"micro_batch": 1}),
    "experts chosen that recompute": (Strategy(shard="auto", expert=2), {"activations": Recompute()}),
    "experts chosen in replicas": (Strategy(replicate=2, shard=2, expert=2), {"precision": "bf16"}),
    "experts chosen and tensor": (Strategy(shard=2, tensor=2, expert=4, sequence=True), {}),
}  # fmt: skip

#: What has no exact formula.
UNKNOWN = {
    "stages of two layers in shards": {"all_gather"},
    "tensor by muon": {"all_gather"},
    "context by torch": {"all_to_all", "all_gather"},
    "context that recomputes": {"all_to_all"},
    "ring that recomputes": {"all_gather"},
}

_MOE = partial(
    MoE, layers=2, heads=4, key_value_heads=2, width=16, experts=4, active=2, expert_hidden=8,
    sequence_length=8, vocabulary=42,
)  # fmt: skip

_TOKENS = partial(SyntheticTokens, sequence_length=8, vocabulary=42)


def with_frozen_table(**options: Any) -> GPT:
    model = GPT(**options)
    model.embedding.token.requires_grad_(False)
    return model


#: The models of cases whose names begin so, on the meta device, and their data; of others a GPT.
MODELS: dict[str, Any] = {
    "images": (
        partial(ResNet, depth=18, classes=10, image_size=32, stem="small"),
        partial(SyntheticImages, classes=10, image_size=32, channels_last=False),
    ),
    "experts in turn": (partial(_MOE, router={"balance": "forced"}), _TOKENS),
    "experts": (_MOE, _TOKENS),
    "llama": (
        partial(Llama, layers=2, heads=4, key_value_heads=2, width=16, hidden=20, sequence_length=8, vocabulary=42),
        _TOKENS,
    ),
    **dict.fromkeys(
        ("stages of two layers", "both ends on a rank", "zero1 of two stages"),
        (partial(GPT, layers=4, heads=4, width=12, sequence_length=8, vocabulary=42), _TOKENS),
    ),
    "stages with a frozen weight": (
        partial(with_frozen_table, layers=2, heads=4, width=12, sequence_length=8, vocabulary=42), _TOKENS
    ),
    "": (partial(GPT, layers=2, heads=4, width=12, sequence_length=8, vocabulary=42), _TOKENS),
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Of a rank: bytes of each operation in a step and of training state, by formula and real, and warnings."""

    by_formula: dict[str, Any]
    sent: Counter[str]
    foreseen: StateBytes
    held: StateBytes
    warned: list[str]


def of_case(name: str) -> Seen:
    """In a rank: steps of a layout, the last of which is looked at."""
    strategy, options = CASES[name]
    setting = {option: value for option, value in options.items() if option in ("precision", "kernels", "activations")}
    make_model, make_data = next(made for begins, made in MODELS.items() if name.startswith(begins))
    model, data, by_muon = on_meta(make_model), make_data(seed=0), "muon" in options
    micro_batch, precision = options.get("micro_batch", "auto"), options.get("precision", "fp32")
    kernels = options.get("kernels", "fused")
    make = muon_of(model) if by_muon else partial(torch.optim.AdamW, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        engine.gradients(*data.samples(0, layout.replica_batch), unscaled)
        optimizer.step()

    with warnings.catch_warnings(record=True) as warned:
        engine, layout, _ = laid_out(strategy, on_meta(make_model), BATCH, micro_batch, **setting)
        optimizer = engine.optimizer(make)
        for _ in range(engine.rehearsals + 1):
            step()
    sent = Counter[str]()
    for call in calls_of(step):
        sent[call.operation] += call.bytes
    stages = footprints(model, make, strategy, layout.dims, precision=precision, kernels=kernels)
    foreseen = stages[layout.dims.stage(dist.get_rank())]
    return Seen(
        comm_bytes(CommModel(
            model, data.example(), layout, strategy, precision, kernels,
            recomputes="activations" in options, gathers=4 * by_muon,
        )),
        sent, foreseen, held(engine, optimizer), [str(warning.message) for warning in warned],
    )  # fmt: skip


def held(engine: Engine, optimizer: torch.optim.Optimizer) -> StateBytes:
    weights = list(engine.module.parameters())
    copies = [copy for part in engine.parts if part.copies for copy in part.copies.tensors]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return StateBytes(
        storage([*weights, *engine.module.buffers(), *copies]),
        storage(gradients),
        storage([value for values in optimizer.state.values() for value in values.values()]),
    )


def storage(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that these tensors are in, each counted once."""
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, Seen]]:
    return on_ranks(4, each, of_case, sorted(selected(request, "name")))


over_cases = cases(
    "name",
    CASES,
    daily=[
        "ddp in bf16", "images in shards", "zero1", "zero1 of two stages a rank",
        "fsdp by muon", "hsdp", "pdp by muon", "stages with a frozen weight in common", "tensor and shards",
        "tensor and stages", "context and shards", "ring and tensor", "llama in bf16", "experts chosen in replicas",
        "fsdp by torch",
    ],
)  # fmt: skip


@pytest.mark.ranks
@over_cases
def test_sent_bytes_equal_the_formula(of_ranks, name):
    by_formula = of_ranks[0][name].by_formula
    sent = {
        operation: sum(of_rank[name].sent[operation] for of_rank in of_ranks) / len(of_ranks)
        for operation in OPERATIONS
    }
    unknown = {operation for operation, size in by_formula.items() if size is None}
    assert unknown == ({"dispatch", "combine"} if "chosen" in name else UNKNOWN.get(name, set()))
    assert sent == by_formula | {operation: sent[operation] for operation in unknown}
    assert [of_rank[name].warned for of_rank in of_ranks] == [[]] * 4


@pytest.mark.ranks
@over_cases
def test_held_bytes_equal_the_footprint(of_ranks, name):
    strategy = CASES[name][0]
    dims = strategy.dims(4)
    of_stages: dict[int, list[bool]] = {}
    for rank, (foreseen, real) in enumerate((of_rank[name].foreseen, of_rank[name].held) for of_rank in of_ranks):
        assert (real.weights, real.gradients) == (foreseen.weights, foreseen.gradients)
        assert 0 < real.optimizer <= foreseen.optimizer
        of_stages.setdefault(dims.stage(rank), []).append(real.optimizer == foreseen.optimizer)
    # The last shards of a weight are padded, and their state is not; and one of several owners has the most.
    is_divided = strategy.shards(dims) or strategy.optimizer == "zero1"
    assert all(any(same) if is_divided else all(same) for same in of_stages.values())


def test_what_an_own_router_sends_is_unknown():
    strategy = Strategy(shard=2, expert=2)
    by_formula = [
        comm_bytes(CommModel(model(kind), data(20).example(), layout_of(strategy, 2, BATCH), strategy))
        for kind in ("forced", "own router")
    ]
    assert None not in by_formula[0].values()
    assert by_formula[1] == {**by_formula[0], "dispatch": None, "combine": None}


@pytest.mark.parametrize(("stages", "unknown"), [(3, set()), (4, {"all_gather"})])
def test_gathers_of_many_stages_are_unknown(stages, unknown):
    assert signature(_add_unshard_reshard).parameters["max_active_stages"].default == 3
    staged = {"pipeline": 2, "schedule": "looped_bfs", "stages_per_rank": stages}
    strategy = Strategy(shard=2, reshard_after_forward=False, **staged)
    by_formula = comm_bytes(CommModel(gpt(layers=8), data().example(), layout_of(strategy, 4, BATCH), strategy))
    assert {operation for operation, size in by_formula.items() if size is None} == unknown


def test_real_model_is_not_run():
    """It would draw random numbers for dropout, and another run would draw others."""
    model, ran = MODELS[""][0](), []
    model.register_forward_hook(lambda *_: ran.append(1))
    for part in model.parts().values():
        part.register_forward_hook(lambda *_: ran.append(1))
    strategy = Strategy(replicate=2, pipeline=2, microbatches=2)
    volumes = comm_bytes(CommModel(model, data(42).example(), layout_of(strategy, 4, BATCH), strategy))
    assert not ran
    assert set(volumes.values()) == {None}
