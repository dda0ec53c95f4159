"""The four strategies: what they ask of a layout and a model, and the gradients they leave on real ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.foreign import Adapted
from ptdbench.models.gpt import GPT
from ptdbench.models.materialise import materialise
from ptdbench.models.resnet import ResNet
from ptdbench.models.toy import Toy
from ptdbench.parallel import mesh
from ptdbench.parallel.ddp import DDP
from ptdbench.parallel.engine import Setting
from ptdbench.parallel.fsdp import FSDP
from ptdbench.parallel.layout import Layout, arrange
from ptdbench.parallel.pdp import PDP, _costs
from ptdbench.parallel.single import Single
from ptdbench.problems import ConfigError
from tests.parallel.ranks import on_ranks

SHAPE = {"layers": 4, "heads": 2, "width": 16, "sequence_length": 8, "vocabulary": 40}
BATCH, MICRO_BATCH = 16, 1
STRATEGIES = {
    "ddp": DDP(),
    "ddp in small buckets": DDP(bucket_mb=0.001, gradient_as_bucket_view=False),
    "fsdp": FSDP(),
    "fsdp without resharding": FSDP(reshard_after_forward=False),
    "1f1b": PDP(pipeline_size=2, schedule="1f1b", microbatches=4),
    "gpipe": PDP(pipeline_size=2, schedule="gpipe", microbatches=4),
    "1f1b on 4 stages": PDP(pipeline_size=4, schedule="1f1b", microbatches=8),
}


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

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_gradients_are_those_of_one_process(self, of_ranks, name):
        loss, expected = reference()
        seen = [of_rank[name] for of_rank in of_ranks]
        names = set()
        for gradients in (of_rank["gradients"] for of_rank in seen):
            assert gradients
            names |= set(gradients)
            for parameter, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=parameter)
        assert names - {"head.projection.weight"} == set(expected) - {"head.projection.weight"}
        replicas = seen[0]["layout"].data
        assert sum(of_rank["loss"].item() for of_rank in seen) / replicas == pytest.approx(loss, rel=1e-5)

    @pytest.mark.parametrize("name", ["1f1b", "gpipe", "1f1b on 4 stages"])
    def test_both_copies_of_a_shared_weight_have_its_whole_gradient(self, of_ranks, name):
        seen = [of_rank[name]["gradients"] for of_rank in of_ranks]
        embedding = [gradients["embedding.token.weight"] for gradients in seen if "embedding.token.weight" in gradients]
        head = [gradients["head.projection.weight"] for gradients in seen if "head.projection.weight" in gradients]
        assert len(embedding) == len(head) == of_ranks[0][name]["layout"].data
        for first, last in zip(embedding, head, strict=True):
            torch.testing.assert_close(first, last)

    @pytest.mark.parametrize("name", ["1f1b", "gpipe", "1f1b on 4 stages"])
    def test_only_the_last_stage_knows_the_loss(self, of_ranks, name):
        losses = [of_rank[name]["loss"].item() for of_rank in of_ranks]
        stages = of_ranks[0][name]["layout"].pipeline
        assert [loss > 0 for loss in losses] == [rank % stages == stages - 1 for rank in range(4)]

    @pytest.mark.parametrize(
        ("name", "collectives"),
        [
            ("ddp", 1),  # one bucket holds it all
            ("1f1b", 1),
            ("gpipe", 1),
            ("1f1b on 4 stages", 0),  # one replica
            # 4 layers and the rest are gathered in each of 4 passes, with resharding twice, and reduced once.
            ("fsdp", 2 * 5 * 4 + 5),
            ("fsdp without resharding", 5 * 4 + 5),
        ],
    )
    def test_gradients_are_communicated_in_the_last_pass_only(self, of_ranks, name, collectives):
        assert [of_rank[name]["collectives"] for of_rank in of_ranks] == [collectives] * 4

    def test_neighbouring_ranks_are_stages_of_one_replica(self, of_ranks):
        assert [of_rank["1f1b"]["place"] for of_rank in of_ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [of_rank["ddp"]["place"] for of_rank in of_ranks] == [(0,), (1,), (2,), (3,)]

    def test_a_rank_of_fsdp_holds_a_share_of_every_weight(self, of_ranks):
        whole = sum(parameter.numel() for parameter in gpt().parameters())
        held = [of_rank["fsdp"]["held"] for of_rank in of_ranks]
        assert sum(held) == whole
        assert max(held) < 0.5 * whole


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, dict[str, Any]]]:
    return on_ranks(4, in_rank)


@cache
def reference() -> tuple[float, dict[str, Tensor]]:
    model = gpt()
    materialise(model, model, device="cpu", seed=0)
    loss = model(*data().samples(0, BATCH))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), gradients | {"head.projection.weight": gradients["embedding.token.weight"]}


def in_rank() -> dict[str, dict[str, Any]]:
    return {name: step_of(strategy) for name, strategy in STRATEGIES.items()}


def step_of(strategy: Any) -> dict[str, Any]:
    """The last of three steps: DDP arranges its buckets anew in the second, and nothing may be left of either."""
    where = strategy.layout(dist.get_world_size(), BATCH, MICRO_BATCH)
    grid = mesh.build(where, "cpu")
    model = gpt()
    strategy.check(model, where)
    engine = strategy(model, Setting(mesh=grid, layout=where, device=torch.device("cpu")))
    replica = grid["data"]
    for step in (2, 1, 0):
        engine.module.zero_grad()
        before = replica.get_group()._get_sequence_number_for_group()
        loss = engine.gradients(*data().samples(*where.rows(step, replica.get_local_rank())), lambda loss: loss)
    parameters = {name.removeprefix("module."): p for name, p in engine.module.named_parameters()}
    return {
        "loss": loss, "layout": where, "place": tuple(grid.get_coordinate()),
        "collectives": replica.get_group()._get_sequence_number_for_group() - before,
        "held": sum(local(parameter).numel() for parameter in parameters.values()),
        "gradients": {name: whole(parameter.grad) for name, parameter in parameters.items()},
    }  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TestRanks:
    @pytest.mark.parametrize(("strategy", "ranks"), [(Single(), 1), (DDP(), 8), (FSDP(), 8), (PDP(), 8)])
    def test_each_takes_all_devices_but_single(self, strategy, ranks):
        assert strategy.ranks(8) == ranks

    def test_single_is_one_rank(self):
        assert Single().layout(1, 12, 3) == Layout(1, 1, 12, 3, 1, 4)
        assert "runs on one rank, and there are 2" in refused(Single().layout, 2, 12, "auto")

    @pytest.mark.parametrize("strategy", [DDP(), FSDP()])
    def test_replicas_share_the_batch(self, strategy):
        assert strategy.layout(4, 16, 2) == Layout(4, 1, 16, 2, 1, 2)
        assert "must be a multiple" in refused(strategy.layout, 4, 18, "auto")


class TestStaticGraph:
    def test_with_accumulation_it_is_refused_where_it_was_asked_for(self):
        assert refused(DDP(static_graph=True).layout, 2, 16, 2) == (
            "parallel.static_graph=true: is not sound with gradient accumulation, and there are 4 passes a step; "
            "try auto, false, or train.micro_batch=auto"
        )

    @pytest.mark.parametrize("static_graph", ["auto", False])
    def test_else_it_is_left_out(self, static_graph):
        assert DDP(static_graph=static_graph).layout(2, 16, 2).accumulation == 4

    def test_without_accumulation_it_may_be_asked_for(self):
        assert DDP(static_graph=True).layout(2, 16, "auto").accumulation == 1


class TestPipeline:
    @pytest.mark.parametrize(("world", "stages"), [(1, 1), (2, 2), (4, 2), (6, 2), (9, 3), (5, 5)])
    def test_automatic_stages_are_the_fewest(self, world, stages):
        assert PDP().layout(world, 90, "auto").pipeline == stages

    def test_stages_come_first_and_replicas_from_what_is_left(self):
        assert PDP(pipeline_size=2, microbatches=4).layout(4, 16, "auto") == Layout(2, 2, 16, 2, 4, 1)

    def test_one_stage_on_several_ranks_is_ddp(self):
        assert refused(PDP(pipeline_size=1).layout, 4, 16, "auto") == (
            "parallel.pipeline_size=1: one stage on 4 ranks is plain data parallelism; try 2, 4, or parallel=ddp"
        )

    @pytest.mark.parametrize(
        ("strategy", "batch", "micro_batch", "remedy"),
        [
            (PDP(microbatches=1), 16, "auto", "auto"),
            (PDP(), 16, 16, "a smaller train.micro_batch than 16"),
            (PDP(), 1, "auto", "a train.global_batch of at least 2"),
        ],
    )
    def test_1f1b_wants_a_micro_batch_for_every_stage(self, strategy, batch, micro_batch, remedy):
        assert refused(strategy.layout, 2, batch, micro_batch) == (
            "parallel.microbatches=1: must be at least the number of stages, 2, under 1f1b; "
            f"try {remedy}, or parallel.schedule=gpipe"
        )
        gpipe = PDP(schedule="gpipe", microbatches=strategy.microbatches)
        assert gpipe.layout(2, batch, micro_batch).microbatches == 1

    @pytest.mark.parametrize(("world", "batch", "offered"), [(4, 3, 4), (8, 2, 8)])
    def test_the_offered_batch_would_do(self, world, batch, offered):
        strategy = PDP(pipeline_size=4)
        assert f"try a train.global_batch of at least {offered}," in refused(strategy.layout, world, batch, "auto")
        assert strategy.layout(world, offered, "auto").microbatches == 4

    def test_more_stages_than_layers(self):
        where = arrange(8, 16, pipeline=8, microbatches="auto")
        assert refused(PDP().check, gpt(), where) == (
            "parallel.pipeline_size=8: must not exceed the number of the model's layers, 4; try 2, 4"
        )
        where = arrange(5, 20, pipeline=5, microbatches="auto")
        assert refused(PDP().check, gpt(), where).endswith("try another cluster.ranks_per_node, or parallel=ddp")

    @pytest.mark.parametrize("build", [gpt, lambda: on_meta(Toy), lambda: on_meta(ResNet, depth=18, image_size=32)])
    def test_every_chain_can_be_cut(self, build):
        PDP().check(build(), arrange(2, 16, pipeline=2, microbatches="auto"))

    def test_a_model_that_is_no_chain(self):
        model = Adapted(nn.Linear(2, 2), lambda: (torch.ones(1, 2), torch.ones(1, 2)))
        assert "the model has no parts()" in refused(PDP().check, model, arrange(2, 4, pipeline=2, microbatches=2))

    def test_parts_are_weighed_by_flops_and_where_nobody_told_by_parameters(self):
        told = on_meta(Toy, inputs=2, width=3, outputs=1, layers=2)
        assert _costs(told, told.parts()) == [4 * 6, 6 * 3]
        chain = Chain()
        untold = Adapted(chain, lambda: (torch.ones(1, 2, device="meta"), torch.ones(1, 1, device="meta")))
        assert _costs(untold, untold.parts()) == [2 * 3 + 3, 3 * 1 + 1]
        PDP().check(untold, arrange(2, 4, pipeline=2, microbatches=2))  # without layers(), parts are what is counted


class Chain(nn.Module):
    """Says what its parts are, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs))

    def parts(self) -> dict[str, nn.Module]:
        return {"first": self.first, "last": self.last}


class TestOptions:
    @pytest.mark.parametrize("size", [0, -1])
    @pytest.mark.parametrize("strategy", [DDP, PDP])
    def test_a_bucket_has_a_size(self, strategy, size):
        assert "must be greater than 0 (MiB)" in refused(lambda: strategy(bucket_mb=size))
