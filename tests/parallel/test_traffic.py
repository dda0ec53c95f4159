"""Bytes that ranks send in a step, by hand, and that they hold after it, by the footprint."""

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.data.synthetic import SyntheticImages, SyntheticTokens
from ptdbench.local_part import local_part
from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Llama
from ptdbench.models.moe import MoE
from ptdbench.models.resnet import ResNet
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.footprint import StateBytes, footprints
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.optim.made_muon import muon_of
from tests.parallel.made import calls_of, laid_out, on_meta, unscaled
from tests.parallel.ranks import each, on_ranks
from tests.parallel.splitting import where_split

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
    "fsdp that reduces each": (Strategy(shard="auto", reduce_scatter_each_microbatch=True), {"micro_batch": 1}),
    "fsdp by torch": (Strategy(shard="auto"), {"micro_batch": 1, "precision": "bf16", "kernels": "torch"}),
    "fsdp in groups": (Strategy(shard="auto", reshard_after_forward=2), {}),
    "hsdp": (Strategy(replicate=2, shard="auto"), {}),
    "pdp": (Strategy(replicate="auto", pipeline=2, microbatches=2), {"micro_batch": 1}),
    "pdp by muon": (Strategy(replicate="auto", pipeline=2, microbatches=2), {"muon": True}),
    "gpipe in bf16": (Strategy(replicate=2, pipeline=2, schedule="gpipe", microbatches=2), {"precision": "bf16"}),
    "stages with a frozen weight in common": (Strategy(replicate=2, pipeline=2, microbatches=2), {}),
    "stages in shards": (Strategy(shard="auto", pipeline=2, microbatches=2), {"micro_batch": 1}),
    "stages of two layers in shards": (Strategy(shard="auto", pipeline=2, microbatches=2), {"micro_batch": 1}),
    **where_split({
        "both ends on a rank": lambda: (
            Strategy(replicate=2, pipeline=2, schedule="dualpipev", microbatches=4), {}
        ),
    }),
    "tensor": (Strategy(replicate="auto", tensor=2), {"micro_batch": 1}),
    "tensor and shards": (Strategy(shard="auto", tensor=2, sequence=True), {"micro_batch": 2}),
    "tensor and stages": (Strategy(tensor=2, pipeline=2, microbatches=2), {"precision": "bf16"}),
    "context and shards": (Strategy(shard=2, context=2), {"micro_batch": 1, "precision": "bf16"}),
    "ring and tensor": (Strategy(context=2, tensor=2, context_method="ring"), {}),
    "context and tensor": (Strategy(context=2, tensor=2), {}),
    "context that sends bf16": (Strategy(context=4, gradients="bf16", optimizer="zero1"), {}),
    "llama in bf16": (Strategy(shard="auto", tensor=2), {"precision": "bf16"}),
    "experts in turn": (Strategy(shard="auto", expert=2), {"micro_batch": 1}),
    "experts in turn and stages": (Strategy(shard=2, expert=2, pipeline=2), {"precision": "bf16"}),
    "experts in turn, positions and stages": (
        Strategy(pipeline=2, tensor=2, expert=2, sequence=True, microbatches=2), {"micro_batch": 1}
    ),
    "experts chosen": (Strategy(shard="auto", expert=4), {"micro_batch": 1}),
    "experts chosen in replicas": (Strategy(replicate=2, shard=2, expert=2), {"precision": "bf16"}),
    "experts chosen and tensor": (Strategy(shard=2, tensor=2, expert=4, sequence=True), {}),
}  # fmt: skip

#: Bytes that a rank sends in a step on average, by hand. The GPT has 4,392 weights: tables of 42 and 8 rows of 12, two
#: layers of 1,884, and a norm of 24; four ranks pad the first table by two rows. Activations: 8 x 12 numbers a sample.
SENT = {
    "ddp": {"all_reduce": 4 * 4392},
    "ddp in bf16": {"all_reduce": 2 * 4392},
    "zero1": {"all_reduce": 4 * 4392, "broadcast": 4 * 4392},
    # All weights in each of two passes, and the first layer again in the backward pass.
    "fsdp": {"all_gather": 2 * 4 * (4416 + 1884), "reduce_scatter": 4 * 4416},
    "fsdp by torch": {"all_gather": 2 * 2 * (4416 + 2 * 1884), "reduce_scatter": 4 * 4416},
    "fsdp by muon": {"all_gather": 4 * (4416 + 1884 + 2 * 1728), "reduce_scatter": 4 * 4416},
    "hsdp": {"all_gather": 4 * (4392 + 1884), "reduce_scatter": 4 * 4392, "all_reduce": 4 * 4392 / 2},
    # Each of two stages sends the activations, or their gradients, of four samples, and the gradient of its table.
    "pdp": {**dict.fromkeys(("send", "recv"), 4 * (4 * 96 + 504)), "all_reduce": 4 * (4392 + 504) / 2},
    "stages with a frozen weight in common": {
        **dict.fromkeys(("send", "recv"), 4 * 4 * 96), "all_reduce": 4 * (4392 - 504) / 2
    },
    # Of a layer, four sums of activations; of one of two stages, the table's and the head's, and three numbers a token.
    "tensor and stages": {
        **dict.fromkeys(("send", "recv"), 2 * 8 * 96 + 4 * 504 / 2),
        "all_reduce": 2 * 8 * 96 * (4 + (1 + 1) / 2) + 4 * 3 * 64 / 2,
    },
    # Queries, keys, values and their mixture, and the gradients of these; and the loss.
    "context and shards": {
        "all_gather": 4 * 2 * (4416 + 1884), "reduce_scatter": 4 * 4416,
        "all_to_all": 2 * 2 * 4 * 2 * 4 * 96 / 2, "all_reduce": 4,
    },
}  # fmt: skip

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
    """Of a rank: bytes of each operation in a step, of training state, foreseen and real, and warnings."""

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
    return Seen(sent, foreseen, held(engine, optimizer), [str(warning.message) for warning in warned])


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
def test_sent_bytes_are_as_worked_out(of_ranks, name):
    sent = sum((of_rank[name].sent for of_rank in of_ranks), Counter[str]())
    assert name not in SENT or {operation: size / len(of_ranks) for operation, size in sent.items()} == SENT[name]
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
