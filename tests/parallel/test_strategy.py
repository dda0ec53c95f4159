"""Layouts by their degrees: what they ask of a batch and a model, and the gradients they leave on real ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.foreign import Adapted
from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import materialize
from ptdbench.models.resnet import ResNet
from ptdbench.models.toy import Toy
from ptdbench.parallel import ring
from ptdbench.parallel.activations import Recompute, Selective
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.engine import Accumulating, Engine
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.pipeline.pipelined import Pipelined
from ptdbench.parallel.pipeline.stage import costs
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from tests.daily import cases, selected
from tests.parallel.ranks import mesh_of, on_ranks
from tests.parallel.splitting import needs_splitting, where_split

SHAPE = {"layers": 4, "heads": 4, "width": 16, "sequence_length": 8, "vocabulary": 40}
BATCH, MICRO_BATCH = 16, 1
STRATEGIES = {
    "ddp": Strategy(replicate="auto"),
    "ddp in small buckets": Strategy(replicate="auto", bucket_mb=0.001, gradient_as_bucket_view=False),
    "fsdp": Strategy(shard="auto"),
    "fsdp without resharding": Strategy(shard="auto", reshard_after_forward=False),
    "fsdp resharding between": Strategy(shard="auto", reshard_after_forward=False, reshard_between_microbatches=True),
    "fsdp kept between": Strategy(shard="auto", reshard_between_microbatches=False),
    "fsdp resharding to pairs": Strategy(shard="auto", reshard_after_forward=2),
    "fsdp gathering ahead": Strategy(shard="auto", prefetch=2),
    "hsdp": Strategy(replicate=2, shard="auto"),
    "1f1b": Strategy(replicate="auto", pipeline=2, schedule="1f1b", microbatches=4),
    "gpipe": Strategy(replicate="auto", pipeline=2, schedule="gpipe", microbatches=4),
    "1f1b on 4 stages": Strategy(replicate="auto", pipeline=4, schedule="1f1b", microbatches=8),
    "stages in shards": Strategy(shard="auto", pipeline=2, schedule="1f1b", microbatches=4),
    "tensor and copies": Strategy(replicate="auto", tensor=2),
    "tensor and copies, sequence": Strategy(replicate="auto", tensor=2, sequence=True),
    "tensor and shards": Strategy(shard="auto", tensor=2),
    "tensor and shards, sequence": Strategy(shard="auto", tensor=2, sequence=True),
    "tensor and stages": Strategy(pipeline=2, tensor=2, microbatches=4),
    "context and copies": Strategy(replicate=2, context=2),
    "context and shards": Strategy(shard=2, context=2),
    "context and stages": Strategy(context=2, pipeline=2, microbatches=4),
    "context and tensor": Strategy(context=2, tensor=2, sequence=True),
    "ring and copies": Strategy(replicate=2, context=2, context_method="ring"),
    "ring and shards": Strategy(shard=2, context=2, context_method="ring"),
    "ring and stages": Strategy(context=2, pipeline=2, microbatches=4, context_method="ring"),
    "ring and tensor": Strategy(context=2, tensor=2, sequence=True, context_method="ring"),
    "ring of four": Strategy(context=4, context_method="ring"),
    "tensor and stages, sequence": Strategy(pipeline=2, tensor=2, microbatches=4, sequence=True),
}
#: Gradients are rounded to 8 or 11 bits of mantissa for their reduction.
NARROW = {
    "ddp in bf16": Strategy(replicate="auto", gradients="bf16"),
    "ddp in bf16 without views": Strategy(replicate="auto", gradients="bf16", gradient_as_bucket_view=False),
    "1f1b in bf16": Strategy(replicate="auto", pipeline=2, microbatches=4, gradients="bf16"),
    "fsdp in bf16": Strategy(shard="auto", gradients="bf16"),
    "ddp in fp16": Strategy(replicate="auto", gradients="fp16"),
    "fsdp in fp16": Strategy(shard="auto", gradients="fp16"),
}
#: On eight ranks.
PRODUCTS = {
    "all three": Strategy(replicate=2, shard=2, pipeline=2, microbatches=2),
    "with tensor": Strategy(shard=2, pipeline=2, tensor=2, microbatches=2),
    "with context": Strategy(replicate=2, shard=2, context=2),
    "with tensor, sequence": Strategy(replicate=2, pipeline=2, tensor=2, microbatches=2, sequence=True),
    "all three, kept whole": Strategy(replicate=2, shard=2, pipeline=2, schedule="gpipe", reshard_after_forward=False),
    **where_split({
        "with tensor, zero bubble": lambda: Strategy(
            replicate=2, pipeline=2, tensor=2, microbatches=2, schedule="zbv"
        ),
    }),
}  # fmt: skip


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def on_meta(build: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return build(**options)


def gpt() -> GPT:
    """On four stages the head, for all its vocabulary, must share one; its weight is the embedding's."""
    return on_meta(GPT, **SHAPE)


def data() -> SyntheticTokens:
    return SyntheticTokens(sequence_length=8, vocabulary=40, seed=0)


class TestOnRanks:
    """Gradients of one step with accumulation, by parameter, against those of the plain model on the whole batch."""

    pytestmark = pytest.mark.ranks

    @cases(
        "name",
        STRATEGIES,
        daily=[
            "ddp", "fsdp", "fsdp kept between", "hsdp", "1f1b", "gpipe", "stages in shards",
            "tensor and shards, sequence", "tensor and stages", "context and shards", "ring and stages",
        ],
    )  # fmt: skip
    def test_gradients_are_those_of_one_process(self, of_ranks, name):
        check([of_rank[name] for of_rank in of_ranks])

    @cases("name", NARROW, daily=["ddp in bf16", "fsdp in fp16"])
    def test_a_narrow_reduction_rounds_them(self, of_ranks, name):
        """To three or four decimal digits each; four summands, and the noise is no bias."""
        _, expected = reference()
        errors = []
        for of_rank in (of_rank[name] for of_rank in of_ranks):
            for parameter, gradient in of_rank["gradients"].items():
                scale = expected[parameter].abs().max().item()
                torch.testing.assert_close(gradient, expected[parameter], rtol=2e-2, atol=1e-2 * scale, msg=parameter)
                errors.append(((gradient - expected[parameter]).abs().max() / scale).item())
        assert max(errors) > 1e-4  # fp32 keeps seven digits

    @cases("name", PRODUCTS, daily=["all three", "with tensor"])
    def test_so_they_are_under_every_product_of_degrees(self, of_eight, name):
        check([of_rank[name] for of_rank in of_eight])

    def test_ranks_that_own_the_loss_are_one_a_replica(self, of_ranks, of_eight):
        for seen in (of_ranks, of_eight):
            for name in seen[0]:
                owners = [of_rank[name]["owns_loss"] for of_rank in seen]
                assert sum(owners) == seen[0][name]["layout"].replicas, name
                assert all(of_rank[name]["owns_loss"] or of_rank[name]["loss"] == 0 for of_rank in seen), name

    @cases("name", ["1f1b", "gpipe", "1f1b on 4 stages", "stages in shards"], daily=["1f1b", "stages in shards"])
    def test_both_copies_of_a_shared_weight_have_its_whole_gradient(self, of_ranks, name):
        seen = [of_rank[name]["gradients"] for of_rank in of_ranks]
        embedding = [gradients["embedding.token.weight"] for gradients in seen if "embedding.token.weight" in gradients]
        head = [gradients["head.projection.weight"] for gradients in seen if "head.projection.weight" in gradients]
        assert len(embedding) == len(head) == of_ranks[0][name]["layout"].replicas
        for first, last in zip(embedding, head, strict=True):
            torch.testing.assert_close(first, last)

    @cases("name", ["1f1b", "gpipe", "1f1b on 4 stages"], daily=["1f1b"])
    def test_only_the_last_stage_knows_the_loss(self, of_ranks, name):
        losses = [of_rank[name]["loss"].item() for of_rank in of_ranks]
        stages = of_ranks[0][name]["layout"].dims.pipeline
        assert [loss > 0 for loss in losses] == [rank % stages == stages - 1 for rank in range(4)]

    @cases(
        ("name", "collectives"),
        [
            ("ddp", 1),  # one bucket holds it all
            ("1f1b", 1),
            ("gpipe", 1),
            ("1f1b on 4 stages", 0),  # one replica
            # 4 layers are gathered in each of 4 passes, with resharding twice, the rest once, and all are reduced once.
            ("fsdp", (2 * 4 + 1) * 4 + 5),
            ("fsdp resharding between", 5 * 4 + 5),
            # Gathered for the first forward pass and, layers only, for each backward pass.
            ("fsdp kept between", 5 + 4 * 4 + 5),
            ("fsdp without resharding", 5 + 5),
            ("fsdp resharding to pairs", 5 * 4 + 5),  # the pairs gather among themselves for the backward pass
            ("fsdp gathering ahead", (2 * 4 + 1) * 4 + 5),  # the same, earlier
        ],
        daily=[("ddp", 1), ("1f1b", 1), ("fsdp", (2 * 4 + 1) * 4 + 5), ("fsdp kept between", 5 + 4 * 4 + 5)],
    )
    def test_gradients_are_communicated_in_the_last_pass_only(self, of_ranks, name, collectives):
        assert [of_rank[name]["collectives"] for of_rank in of_ranks] == [collectives] * 4

    def test_neighboring_ranks_are_stages_of_one_copy_or_its_shards(self, of_ranks, of_eight):
        assert [of_rank["1f1b"]["place"] for of_rank in of_ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [of_rank["ddp"]["place"] for of_rank in of_ranks] == [(0, 0), (1, 0), (2, 0), (3, 0)]
        assert [of_rank["hsdp"]["place"] for of_rank in of_ranks] == [(0, 0), (1, 0), (2, 0), (3, 0)]
        places = [of_rank["all three"]["place"] for of_rank in of_eight]
        assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]

    def test_a_rank_of_fsdp_holds_a_share_of_every_weight(self, of_ranks):
        whole = sum(parameter.numel() for parameter in gpt().parameters())
        held = [of_rank["fsdp"]["held"] for of_rank in of_ranks]
        assert sum(held) == whole
        assert max(held) < 0.5 * whole

    def test_a_copy_of_hybrid_sharding_holds_every_weight_once(self, of_ranks):
        whole = sum(parameter.numel() for parameter in gpt().parameters())
        held = [of_rank["hsdp"]["held"] for of_rank in of_ranks]
        assert held[0] + held[1] == held[2] + held[3] == whole


def check(seen: list[dict[str, Any]]) -> None:
    """The gradients of all ranks are the plain model's, and so is the mean of the replicas' losses."""
    loss, expected = reference()
    names = set()
    for gradients in (of_rank["gradients"] for of_rank in seen):
        assert gradients
        names |= set(gradients)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=parameter)
    assert names - {"head.projection.weight"} == set(expected) - {"head.projection.weight"}
    replicas = seen[0]["layout"].replicas
    assert sum(of_rank["loss"].item() for of_rank in seen) / replicas == pytest.approx(loss, rel=1e-5)
    norm = torch.stack([gradient.norm() for name, gradient in expected.items() if name != "head.projection.weight"])
    for of_rank in seen:
        torch.testing.assert_close(of_rank["norm"], norm.norm(), rtol=1e-4, atol=0)


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    names = selected(request, "name") | {"ddp", "fsdp", "hsdp", "1f1b"}
    return on_ranks(4, in_rank, {name: one for name, one in (STRATEGIES | NARROW).items() if name in names})


@pytest.fixture(scope="module")
def of_eight(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    names = selected(request, "name") | {"all three"}
    return on_ranks(8, in_rank, {name: one for name, one in PRODUCTS.items() if name in names})


@cache
def reference() -> tuple[float, dict[str, Tensor]]:
    model = gpt()
    materialize(model, model, device="cpu", seed=0)
    loss = model(*data().samples(0, BATCH))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), gradients | {"head.projection.weight": gradients["embedding.token.weight"]}


def in_rank(strategies: dict[str, Strategy]) -> dict[str, dict[str, Any]]:
    return {name: step_of(strategy) for name, strategy in strategies.items()}


def step_of(strategy: Strategy) -> dict[str, Any]:
    """What the last step leaves; each operation on a DTensor takes a CPU long, so that they do fewer passes."""
    dims = strategy.dims(dist.get_world_size())
    layout = strategy.layout(dims, BATCH, MICRO_BATCH if dims.tensor == dims.context == 1 else 2 * MICRO_BATCH)
    mesh = mesh_of(layout.dims)
    model = gpt()
    strategy.check(model, layout)
    engine = strategy(model, Setting(mesh=mesh, layout=layout, device=torch.device("cpu")))
    return last_step(engine, mesh, layout)


def last_step(engine: Engine, mesh: Mesh, layout: BatchPlan) -> dict[str, Any]:
    """Nothing may be left of the step before, nor of two: DDP arranges its buckets anew in the second."""
    group, replica = mesh.batch.get_group(), mesh.batch.get_local_rank()
    for step in (2, 1, 0) if layout.dims.shard == 1 else (1, 0):
        engine.module.zero_grad()
        before = group._get_sequence_number_for_group()
        loss = engine.gradients(*data().samples(*layout.rows(step, replica)), lambda loss: loss)
    collectives = group._get_sequence_number_for_group() - before
    parameters = dict(engine.module.named_parameters())
    return {
        "loss": loss, "layout": layout, "owns_loss": engine.owns_loss, "norm": engine.gradient_norm(),
        "place": (replica, mesh["pipeline"].get_local_rank() if mesh["pipeline"] else 0), "collectives": collectives,
        "held": sum(local(parameter).numel() for parameter in parameters.values()),
        "gradients": {name: whole(parameter.grad) for name, parameter in parameters.items()},
    }  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TestRanks:
    @pytest.mark.parametrize(
        ("strategy", "available", "ranks"),
        [
            (Strategy(), 8, 1),
            (Strategy(replicate="auto"), 8, 8),
            (Strategy(shard="auto"), 8, 8),
            (Strategy(replicate="auto", pipeline="auto"), 8, 8),
            (Strategy(replicate=2, shard="auto"), 8, 8),
            (Strategy(replicate=3, shard="auto"), 8, 6),
            (Strategy(replicate=3, shard="auto"), 2, 3),
            (Strategy(replicate=2, pipeline=2), 8, 4),
        ],
    )
    def test_a_run_takes_as_many_of_the_devices_as_fit(self, strategy, available, ranks):
        assert strategy.ranks(available) == ranks

    @pytest.mark.parametrize("strategy", [Strategy(replicate="auto"), Strategy(shard="auto")])
    def test_replicas_share_the_batch(self, strategy):
        assert layout_of(strategy, 4, 16, 2) == BatchPlan(strategy.dims(4), 16, 2, 1, 2)

    def test_one_rank_accumulates(self):
        assert layout_of(Strategy(), 1, 12, 3) == BatchPlan(Dims(), 12, 3, 1, 4)

    @pytest.mark.ranks
    def test_on_one_rank_what_was_asked_for_is_applied_all_the_same(self):
        (kinds,) = on_ranks(1, kinds_on_one_rank)
        assert kinds == {
            "single": (False, False, False), "ddp": (True, False, False),
            "fsdp": (False, True, False), "pdp": (False, False, True),
            **where_split({"zbv": lambda: (False, False, True)}),
        }  # fmt: skip


def kinds_on_one_rank() -> dict[str, tuple[bool, bool, bool]]:
    """Whether there is DDP, FSDP and a pipeline, by what stands in the presets."""
    presets = {
        "single": Strategy(), "ddp": Strategy(replicate="auto"), "fsdp": Strategy(shard="auto"),
        "pdp": Strategy(replicate="auto", pipeline="auto"),
        **where_split({"zbv": lambda: Strategy(replicate="auto", pipeline="auto", schedule="zbv")}),
    }  # fmt: skip
    found = {}
    for name, strategy in presets.items():
        layout = layout_of(strategy, 1, 4)
        engine = strategy(gpt(), Setting(mesh=mesh_of(layout.dims), layout=layout, device=torch.device("cpu")))
        part = engine._part if isinstance(engine, Accumulating) else next(iter(engine._parts.values()))
        found[name] = (
            isinstance(part.runner, DistributedDataParallel), isinstance(part.module, FSDPModule),
            isinstance(engine, Pipelined),
        )  # fmt: skip
    return found


def layout_of(strategy: Strategy, world_size: int, global_batch: int, micro_batch: Any = "auto") -> BatchPlan:
    return strategy.layout(strategy.dims(world_size), global_batch, micro_batch)


class TestStaticGraph:
    def test_with_accumulation_it_is_refused_where_it_was_asked_for(self):
        assert refused(layout_of, Strategy(replicate="auto", static_graph=True), 2, 16, 2) == (
            "static_graph=true: is not sound with gradient accumulation, and there are 4 passes a step; "
            "try auto, false, or train.micro_batch=auto"
        )

    def test_under_a_pipeline_too(self):
        strategy = Strategy(replicate="auto", pipeline=2, static_graph=True)
        assert refused(layout_of, strategy, 4, 16) == (
            "static_graph=true: gives wrong gradients under a pipeline; try auto, false"
        )

    @pytest.mark.parametrize("static_graph", ["auto", False])
    def test_else_it_is_left_out(self, static_graph):
        assert layout_of(Strategy(replicate="auto", static_graph=static_graph), 2, 16, 2).accumulation == 4

    def test_without_accumulation_it_may_be_asked_for(self):
        assert layout_of(Strategy(replicate="auto", static_graph=True), 2, 16).accumulation == 1


def pipeline(**options: Any) -> Strategy:
    return Strategy(replicate="auto", **{"pipeline": "auto", **options})


class TestPipeline:
    def test_stages_come_first_and_replicas_from_what_is_left(self):
        assert layout_of(pipeline(pipeline=2, microbatches=4), 4, 16) == BatchPlan(
            Dims(replicate=2, pipeline=2), 16, 2, 4
        )

    @pytest.mark.parametrize(("share", "stages"), [(16, 2), (16, 4), (12, 3), (7, 2), (6, 4), (100, 4)])
    def test_automatic_micro_batches_keep_the_stages_busy(self, share, stages):
        layout = layout_of(pipeline(pipeline=stages), stages, share)
        enough = [number for number in range(2 * stages, share + 1) if share % number == 0]
        assert layout.microbatches == (enough[0] if enough else share)

    @pytest.mark.parametrize(
        ("strategy", "batch", "micro_batch", "remedy"),
        [
            (pipeline(microbatches=1), 16, "auto", "auto"),
            (pipeline(), 16, 16, "a smaller train.micro_batch than 16"),
            (pipeline(), 1, "auto", "a train.global_batch of at least 2"),
        ],
    )
    def test_1f1b_wants_a_micro_batch_for_every_stage(self, strategy, batch, micro_batch, remedy):
        assert refused(layout_of, strategy, 2, batch, micro_batch) == (
            "microbatches=1: must be at least the number of stages, 2, under 1f1b; "
            f"try {remedy}, or parallel.schedule=gpipe"
        )
        gpipe = pipeline(schedule="gpipe", microbatches=strategy.microbatches)
        assert layout_of(gpipe, 2, batch, micro_batch).microbatches == 1

    @pytest.mark.parametrize(("world", "batch", "offered"), [(4, 3, 4), (8, 2, 8)])
    def test_the_offered_batch_fits(self, world, batch, offered):
        strategy = pipeline(pipeline=4)
        assert f"a train.global_batch of at least {offered}," in refused(layout_of, strategy, world, batch)
        assert layout_of(strategy, world, offered).microbatches == 4

    @pytest.mark.parametrize(
        ("micro_batch", "count", "message"),
        [
            ("auto", 5, "microbatches=5: must divide a replica's share of the batch, 12; try 3, 4, 6"),
            (2, 4, "microbatches=4: must divide the micro-batches of a replica's step, 6; try 2, 3, 6"),
        ],
    )
    def test_micro_batches_divide_what_there_is(self, micro_batch, count, message):
        assert refused(layout_of, pipeline(microbatches=count), 2, 12, micro_batch) == message

    def test_more_stages_than_layers(self):
        strategy = pipeline(pipeline=8)
        assert refused(strategy.check, gpt(), layout_of(strategy, 8, 16)) == (
            "pipeline=8: must not exceed the number of the model's layers, 4; try 2, 4"
        )
        strategy = pipeline(pipeline=5)
        told = refused(strategy.check, gpt(), layout_of(strategy, 5, 20))
        assert told.endswith("try another cluster.ranks_per_node, or parallel=ddp")

    @pytest.mark.parametrize(
        ("ranks", "options", "message"),
        [
            (4, {"schedule": "interleaved1f1b"}, "pipeline=4: pipeline(4) x stages_per_rank(2) = 8 stages must not "
             "exceed the number of the model's layers, 4; try 2, or parallel.schedule=1f1b"),
            (2, {"schedule": "looped_bfs", "stages_per_rank": 3}, "pipeline=2: pipeline(2) x stages_per_rank(3) = 6 "
             "stages must not exceed the number of the model's layers, 4; try parallel.schedule=1f1b"),
        ],
    )  # fmt: skip
    def test_more_stages_on_all_ranks_than_layers(self, ranks, options, message):
        strategy = pipeline(pipeline=ranks, **options)
        assert refused(strategy.check, gpt(), layout_of(strategy, ranks, 16)) == message

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"schedule": "1f1b", "stages_per_rank": 2}, "stages_per_rank=2: must be 1 under 1f1b; try auto, or "
             "parallel.schedule=interleaved1f1b"),
            pytest.param({"schedule": "dualpipev", "stages_per_rank": 3}, "stages_per_rank=3: must be 2 under "
             "dualpipev; try auto, or parallel.schedule=interleaved1f1b", marks=needs_splitting),
            ({"schedule": "looped_bfs", "stages_per_rank": 1}, "stages_per_rank=1: must be a whole number of at "
             "least 2 under looped_bfs; try auto, or parallel.schedule=1f1b"),
        ],
    )  # fmt: skip
    def test_a_schedule_says_how_many_stages_a_rank_has(self, options, message):
        assert refused(lambda: pipeline(**options)) == message

    @pytest.mark.parametrize(
        ("options", "batch", "message"),
        [
            pytest.param({"schedule": "dualpipev", "microbatches": 2}, 16, "microbatches=2: must be at least the "
             "number of stages, 4, under dualpipev; try auto, or parallel.schedule=gpipe", marks=needs_splitting),
            pytest.param({"schedule": "dualpipev"}, 3, "microbatches=3: must be at least the number of stages, 4, "
             "under dualpipev; try a train.global_batch of at least 4, or parallel.schedule=gpipe",
             marks=needs_splitting),
            ({"schedule": "interleaved1f1b", "microbatches": 5}, 10, "microbatches=5: must be a multiple of 2 under "
             "interleaved1f1b, which takes them in 2 equal rounds; try auto, or parallel.schedule=gpipe"),
        ],
    )  # fmt: skip
    def test_a_schedule_says_how_many_micro_batches_it_takes(self, options, batch, message):
        assert refused(layout_of, pipeline(**options), 2, batch) == message

    @pytest.mark.parametrize(
        "schedule", ["interleaved1f1b", pytest.param("interleaved_zero_bubble", marks=needs_splitting)]
    )
    def test_automatic_micro_batches_fill_the_rounds(self, schedule):
        strategy = pipeline(schedule=schedule)
        assert layout_of(strategy, 2, 15).microbatches == 15 // 5
        assert layout_of(strategy, 2, 10, 2) == BatchPlan(Dims(pipeline=2), 10, 2, 1, 5)

    def test_an_older_torch_does_not_split_a_backward_pass(self, monkeypatch):
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.1+cpu"))
        rule = "needs torch 2.15 or newer, and this is 2.14.1+cpu; try interleaved1f1b, looped_bfs"
        pipeline(schedule="looped_bfs")
        assert refused(lambda: pipeline(schedule="zbv")) == f"schedule=zbv: {rule}"

    @needs_splitting
    def test_weights_are_kept_between_the_halves_of_a_backward_pass(self):
        strategy = Strategy(shard=2, pipeline=2, schedule="zbv")
        rule = "gives wrong gradients under zbv, which computes those of weights after other forward passes"
        told = f"reshard_after_forward=true: {rule}; try false, or parallel.schedule=interleaved1f1b"
        assert refused(layout_of, strategy, 4, 16) == told
        for sound in ({"schedule": "zbv", "reshard_after_forward": False}, {"schedule": "interleaved1f1b"}):
            layout_of(Strategy(shard=2, pipeline=2, **sound), 4, 16)

    @needs_splitting
    def test_a_backward_pass_in_two_is_not_compiled(self):
        strategy = pipeline(schedule="zbv")
        told = refused(strategy.check_beside, "compile", "layers", layout_of(strategy, 2, 16))
        rule = "makes one graph of the backward pass, which zbv splits"
        assert told == f"compile=layers: {rule}; try false, or parallel.schedule=interleaved1f1b"
        interleaved = pipeline(schedule="interleaved1f1b")
        interleaved.check_beside("compile", "layers", layout_of(interleaved, 2, 16))

    def test_one_graph_has_no_place_to_gather_weights_in(self):
        told = refused(STRATEGIES["fsdp"].check_beside, "compile", "whole", layout_of(STRATEGIES["fsdp"], 2, 4))
        rule = "is one graph, and sharded weights are gathered between the graphs of the layers"
        assert told == f"compile=whole: {rule}; try layers, or parallel=ddp"
        STRATEGIES["fsdp"].check_beside("compile", "layers", layout_of(STRATEGIES["fsdp"], 2, 4))
        for strategy in (Strategy(), Strategy(replicate="auto"), pipeline()):
            strategy.check_beside("compile", "whole", layout_of(strategy, strategy.ranks(2), 4))

    @needs_splitting
    @pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
    def test_what_is_kept_for_one_backward_pass_is_not_for_two(self, schedule):
        layout = layout_of(pipeline(), 2, 16)
        assert refused(pipeline(schedule=schedule).check_beside, "activations", Selective(), layout) == (
            f"activations=selective: has what it keeps for one backward pass, and {schedule} takes two; "
            "try recompute, keep, or parallel.schedule=interleaved1f1b"
        )
        pipeline(schedule=schedule).check_beside("activations", Recompute(), layout)
        pipeline().check_beside("activations", Selective(), layout)
        ddp = Strategy(replicate="auto")
        ddp.check_beside("activations", Selective(), layout_of(ddp, 2, 16))

    @pytest.mark.parametrize("build", [gpt, lambda: on_meta(Toy), lambda: on_meta(ResNet, depth=18, image_size=32)])
    def test_every_chain_can_be_cut(self, build):
        pipeline().check(build(), layout_of(pipeline(), 2, 16))

    def test_a_model_that_is_not_a_chain(self):
        model = Adapted(nn.Linear(2, 2), lambda: (torch.ones(1, 2), torch.ones(1, 2)))
        assert "the model has no parts()" in refused(pipeline().check, model, layout_of(pipeline(), 2, 4))

    def test_parts_are_weighed_by_flops_and_where_nobody_told_by_parameters(self):
        told = on_meta(Toy, inputs=2, width=3, outputs=1, layers=2)
        assert costs(told, told.parts()) == [4 * 6, 6 * 3]
        chain = Chain()
        untold = Adapted(chain, lambda: (torch.ones(1, 2, device="meta"), torch.ones(1, 1, device="meta")))
        assert costs(untold, untold.parts()) == [2 * 3 + 3, 3 * 1 + 1]
        pipeline().check(untold, layout_of(pipeline(), 2, 4))  # without layers(), parts are what is counted


class Chain(nn.Module):
    """Says what its parts are, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs))

    def parts(self) -> dict[str, nn.Module]:
        return {"first": self.first, "last": self.last}


class TestSharedWork:
    """Of one sample: its matrix products or its positions."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tensor": 3}, "tensor=3: must divide the 40 tokens of the model; try 2"),
            ({"tensor": 8}, "tensor=8: must divide the 4 heads of the model; try 2, 4"),
            ({"tensor": 8, "sequence": True, "context": 2}, "tensor=8: times 2 must divide the 8 positions of the "
             "model, which other ranks share too; try 2, 4"),
            ({"context": 3}, "context=3: must divide the 8 positions of the model; try 2"),
            ({"context": 8, "context_method": "ring"}, "context=8: times 2 must divide the 8 positions of the model, "
             "of which each rank has two pieces; try 2, 4"),
            ({"context": 4, "tensor": 2}, "context=4: times 2 must divide the 4 heads of the model, which other ranks "
             "share too; try 2"),
        ],
    )  # fmt: skip
    def test_a_degree_divides_what_is_shared(self, options, message):
        strategy = Strategy(**options)
        assert refused(strategy.check, gpt(), layout_of(strategy, strategy.ranks(1), 16)).splitlines()[0] == message

    def test_a_ring_needs_no_heads_to_divide(self):
        strategy = Strategy(context=4, tensor=2, context_method="ring")
        strategy.check(gpt(), layout_of(strategy, 8, 16))

    def test_a_ring_computes_what_the_model_says_that_it_is(self, monkeypatch):
        model, strategy = gpt(), Strategy(context=2, context_method="ring")
        roles = {name: replace(role, is_causal=False) for name, role in model.roles().items()}
        monkeypatch.setattr(model, "roles", lambda: roles)
        assert refused(strategy.check, model, layout_of(strategy, 2, 16)) == (
            "context_method=ring: computes causal attention itself, and the model's roles() do not say is_causal of "
            "its attention; try ulysses"
        )

    def test_samples_may_be_shorter_than_the_model_can_take(self):
        ring_of_two, ulysses = (Strategy(context=2, context_method=method) for method in ("ring", "ulysses"))
        layout = layout_of(ring_of_two, 2, 16)
        ring_of_two.check_sample(torch.zeros(1, 48), layout)
        ulysses.check_sample(torch.zeros(1, 50), layout)
        assert refused(ring_of_two.check_sample, torch.zeros(1, 50), layout) == (
            "context=2: times 2 must divide the 50 positions of a sample, of which each rank has two pieces; try 1"
        )
        assert refused(ulysses.check_sample, torch.zeros(1, 51), layout) == (
            "context=2: must divide the 51 positions of a sample; try 1"
        )

    def test_a_ring_is_not_compiled(self):
        strategy = Strategy(replicate="auto", context=2, context_method="ring")
        layout = layout_of(strategy, 2, 16)
        strategy.check_beside("compile", "layers", layout)
        assert refused(strategy.check_beside, "compile", "whole", layout) == (
            "compile=whole: is one graph, and ring attention is not compiled; try layers, or "
            "parallel.context_method=ulysses"
        )

    def test_a_torch_without_a_ring(self, monkeypatch):
        monkeypatch.setattr(ring, "_NEEDED", ("no_such_function",))
        assert refused(lambda: Strategy(context=2, context_method="ring")) == (
            "context_method=ring: needs torch.distributed.tensor.experimental._context_parallel._attention."
            f"no_such_function, which torch {torch.__version__} has not; try ulysses"
        )

    @pytest.mark.parametrize("degree", ["tensor", "context"])
    def test_a_model_without_roles_has_nothing_to_share(self, degree):
        model = Adapted(nn.Linear(2, 2), lambda: (torch.ones(1, 2), torch.ones(1, 2)))
        strategy = Strategy(**{degree: 2})
        told = refused(strategy.check, model, layout_of(strategy, 2, 4))
        assert told.startswith(f"{degree}=2: needs a model whose roles() name ")
        assert told.endswith("try 1, or parallel=ddp,fsdp")

    def test_a_stream_is_shared_only_where_it_begins_somewhere(self):
        strategy = Strategy(tensor=2, sequence=True)
        told = refused(strategy.check, on_meta(Toy), layout_of(strategy, 2, 4))
        assert told == "sequence=true: needs a model whose roles() name the module where its stream begins; try false"
        Strategy(tensor=2).check(on_meta(Toy), layout_of(Strategy(tensor=2), 2, 4))


class TestOptions:
    @pytest.mark.parametrize("size", [0, -1])
    def test_a_bucket_has_a_size(self, size):
        assert "must be greater than 0 (MiB)" in refused(lambda: Strategy(replicate="auto", bucket_mb=size))

    @pytest.mark.parametrize("degree", ["replicate", "shard", "context", "tensor", "pipeline"])
    def test_a_degree_is_at_least_one(self, degree):
        assert refused(lambda: Strategy(**{degree: 0})) == f"{degree}=0: must be a whole number of at least 1"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shard": 4, "bucket_mb": 50}, "bucket_mb=50: has no effect under these degrees of parallelism; "
             "it belongs to parallel=ddp,pdp"),
            ({"replicate": 2, "shard": 2, "static_graph": True}, "static_graph=true: has no effect under these degrees "
             "of parallelism; it belongs to parallel=ddp,pdp"),
            ({"pipeline": 4, "gradients": "bf16"}, "gradients=bf16: has no effect under these degrees of "
             "parallelism; it belongs to parallel=ddp,pdp,fsdp,hsdp"),
            ({"replicate": 4, "reshard_between_microbatches": False}, "reshard_between_microbatches=false: has no "
             "effect under these degrees of parallelism; it belongs to parallel=fsdp,hsdp"),
            ({"shard": 4, "pipeline": 2, "reshard_between_microbatches": True}, "reshard_between_microbatches=true: "
             "has no effect under a pipeline, whose schedule keeps the weights of a stage between micro-batches; "
             "try auto"),
            ({"shard": 4, "schedule": "gpipe"}, "schedule=gpipe: has no effect under these degrees of parallelism; "
             "it belongs to parallel=pdp"),
            ({"shard": 4, "sequence": True}, "sequence=true: has no effect under these degrees of parallelism; "
             "it belongs to parallel=tp,3d"),
            ({"replicate": 4, "tensor": 2, "bucket_mb": 50}, "bucket_mb=50: has no effect under these degrees of "
             "parallelism; it belongs to parallel=ddp,pdp"),
            ({"shard": 4, "context_method": "ring"}, "context_method=ring: has no effect under these degrees of "
             "parallelism; it belongs to parallel.context=2"),
            ({"context": 2, "shard": 2, "bucket_mb": 50}, "bucket_mb=50: has no effect under these degrees of "
             "parallelism; it belongs to parallel=ddp,pdp"),
            ({"context": 2, "powersgd_rank": 3}, "powersgd_rank=3: has no effect without "
             "parallel.gradients=powersgd; omit it"),
        ],
    )  # fmt: skip
    def test_an_option_that_has_no_effect_is_refused(self, options, message):
        assert refused(lambda: Strategy(**options)) == message

    def test_ranks_that_share_a_sequence_average_gradients_as_copies_do(self):
        for options in ({"bucket_mb": 50}, {"gradients": "bf16"}, {"optimizer": "zero1"}, {"static_graph": True}):
            Strategy(context=2, **options)


class TestLevers:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shard": 4, "optimizer": "zero1"}, "optimizer=zero1: has no effect under these degrees of parallelism; "
             "it belongs to parallel=ddp,pdp"),
            ({"shard": 4, "gradients": "powersgd"}, "gradients=powersgd: is made of whole gradients, and here are "
             "shards of them; try auto, bf16, or parallel=ddp"),
            ({"replicate": 2, "shard": 2, "powersgd_rank": 2}, "powersgd_rank=2: has no effect under these degrees of "
             "parallelism; it belongs to parallel=ddp,pdp"),
            ({"replicate": 4, "powersgd_rank": 2}, "powersgd_rank=2: has no effect without "
             "parallel.gradients=powersgd; omit it"),
            ({"replicate": 4, "gradients": "bf16", "powersgd_start": 5}, "powersgd_start=5: has no effect without "
             "parallel.gradients=powersgd; omit it"),
            ({"replicate": 4, "gradients": "powersgd", "powersgd_start": 1}, "powersgd_start=1: must be a whole number "
             "of at least 2"),
            ({"replicate": 4, "gradients": "powersgd", "powersgd_rank": 0}, "powersgd_rank=0: must be a whole number "
             "of at least 1"),
            ({"replicate": 4, "prefetch": 2}, "prefetch=2: has no effect under these degrees of parallelism; it "
             "belongs to parallel=fsdp,hsdp"),
            ({"shard": 4, "prefetch": 0}, "prefetch=0: must be a whole number of at least 1"),
            ({"shard": 4, "pipeline": 2, "reshard_after_forward": 2}, "reshard_after_forward=2: makes groups of "
             "ranks that only shard, without stages, tensor or context parallelism; try true, false"),
        ],
    )  # fmt: skip
    def test_what_does_not_go_together_is_refused(self, options, message):
        assert refused(lambda: Strategy(**options)) == message

    @pytest.mark.parametrize(("size", "ranks", "fits"), [(3, 4, "true, false, 2"), (4, 4, "true, false, 2"),
                                                         (1, 2, "true, false"), (8, 4, "true, false, 2")])  # fmt: skip
    def test_weights_are_resharded_to_a_part_of_the_ranks(self, size, ranks, fits):
        told = refused(layout_of, Strategy(shard="auto", reshard_after_forward=size), ranks, 16)
        rule = f"a number must divide shard({ranks}), and lie between 1 and it"
        assert told == f"reshard_after_forward={size}: {rule}; try {fits}"
        assert layout_of(Strategy(replicate=2, shard="auto", reshard_after_forward=2), 8, 16).dims.shard == 4

    def test_an_error_that_is_not_finite_would_be_kept(self):
        strategy = Strategy(replicate="auto", gradients="powersgd")
        assert refused(strategy.check_beside, "precision", "fp16") == (
            "parallel.gradients=powersgd: is not for scaled losses: a step that overflows is skipped, and its infinite "
            "error would be kept; try auto, or precision=bf16"
        )
        strategy.check_beside("precision", "bf16")
        Strategy(replicate="auto", gradients="fp16").check_beside("precision", "fp16")

    def test_what_is_offloaded_is_sharded(self):
        rule = "is for sharded weights, and these degrees of parallelism shard none; try parallel=fsdp,hsdp"
        for strategy in (Strategy(), Strategy(replicate="auto"), pipeline()):
            layout = layout_of(strategy, strategy.ranks(2), 4)
            told = refused(strategy.check_beside, "offload", "optimizer_and_weights", layout)
            assert told == f"offload=optimizer_and_weights: {rule}"
            strategy.check_beside("offload", "none", layout)
        Strategy(shard="auto").check_beside("offload", "optimizer_and_weights", layout_of(Strategy(shard="auto"), 1, 4))
