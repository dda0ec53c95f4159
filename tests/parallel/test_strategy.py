"""Layouts by their degrees: what they ask of a batch and a model, and the gradients they leave on real ranks."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptdbench.models.foreign import Adapted
from ptdbench.models.gpt import GPT
from ptdbench.models.toy import Toy
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.pipeline_schedules import SCHEDULES
from ptdbench.parallel.pipeline_stages import costs
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.parallel.made import data, gpt, laid_out, layout_of, on_meta, refused, unscaled, whole, with_weights
from tests.parallel.ranks import each, on_ranks, pretended
from tests.parallel.splitting import needs_splitting, where_split
from tests.refusals import Abridged

BATCH, MICRO_BATCH = 16, 1
STRATEGIES = {
    "ddp": Strategy(replicate="auto"),
    "ddp in small buckets": Strategy(replicate="auto", bucket_mb=0.001),
    "fsdp": Strategy(shard="auto"),
    "fsdp without resharding": Strategy(shard="auto", reshard_after_forward=False),
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
    "context and tensor, kept": Strategy(
        context=2, tensor=2, reshard_after_forward=False, reduce_scatter_each_microbatch=True, prefetch=2
    ),
    "ring and copies": Strategy(replicate=2, context=2, context_method="ring"),
    "ring and shards": Strategy(shard=2, context=2, context_method="ring"),
    "ring and stages": Strategy(context=2, pipeline=2, microbatches=4, context_method="ring"),
    "ring and tensor": Strategy(context=2, tensor=2, sequence=True, context_method="ring"),
    "ring of four": Strategy(context=4, context_method="ring"),
    "tensor and stages, sequence": Strategy(pipeline=2, tensor=2, microbatches=4, sequence=True),
}
#: Several stages on a rank: with copies, with shards that are kept and that are freed, and over all ranks.
SEVERAL = {
    f"{schedule}, {name}": Strategy(schedule=schedule, **degrees)
    for schedule, its in SCHEDULES.items()
    if its.stages != 1 and its.is_supported
    for name, degrees in {
        "copies": {"replicate": 2, "pipeline": 2, "microbatches": 4},
        "shards": {"shard": 2, "pipeline": 2, "microbatches": 4, "reshard_after_forward": False},
        "freed": {"shard": 2, "pipeline": 2, "microbatches": 4},
        "alone": {"pipeline": 4},
    }.items()
    if not (its.splits_backward and name == "freed")
}
#: Gradients are rounded to 8 or 11 bits of mantissa for their reduction.
NARROW = {
    "ddp in bf16": Strategy(replicate="auto", gradients="bf16"),
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


class TestOnRanks:
    """Gradients of one step with accumulation, by parameter, against those of the plain model on the whole batch."""

    pytestmark = pytest.mark.ranks

    @cases("name", STRATEGIES | SEVERAL, daily=[
        "ddp", "fsdp", "hsdp", "1f1b", "gpipe", "stages in shards",
        "tensor and shards, sequence", "tensor and stages", "context and shards", "ring and stages",
        "interleaved1f1b, copies", "looped_bfs, shards",
    ])  # fmt: skip
    def test_gradients_equal_one_process(self, of_ranks, name):
        check([of_rank[name] for of_rank in of_ranks])

    @cases("name", NARROW, daily=["ddp in bf16", "fsdp in fp16"])
    def test_narrow_reduction_rounds_gradients(self, of_ranks, name):
        """To three or four decimal digits each; four summands, and the noise is no bias."""
        expected, errors = reference(4)["gradients"], []
        for of_rank in (of_rank[name] for of_rank in of_ranks):
            for parameter, gradient in of_rank["gradients"].items():
                scale = expected[parameter].abs().max().item()
                torch.testing.assert_close(gradient, expected[parameter], rtol=2e-2, atol=1e-2 * scale, msg=parameter)
                errors.append(((gradient - expected[parameter]).abs().max() / scale).item())
        assert max(errors) > 1e-4  # fp32 keeps seven digits

    @cases("name", PRODUCTS, daily=["all three", "with tensor"])
    def test_products_of_degrees_equal_one_process(self, of_eight, name):
        check([of_rank[name] for of_rank in of_eight])


def check(seen: list[dict[str, Any]]) -> None:
    """The gradients of all ranks are the plain model's, and so are the replicas' mean loss and an evaluation."""
    expected, replicas = reference(seen[0]["layers"]), seen[0]["replicas"]
    ends, names = [], set()
    for gradients in (of_rank["gradients"] for of_rank in seen):
        assert gradients
        names |= set(gradients)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected["gradients"][parameter], rtol=1e-4, atol=1e-6, msg=parameter)
        ends += [gradients[name] for name in TIED if name in gradients]
    assert all(torch.equal(gradient, ends[0]) for gradient in ends)  # or copies of a weight would part
    assert names - {TIED[1]} == set(expected["gradients"]) - {TIED[1]}
    assert sum(of_rank["loss"].item() for of_rank in seen) / replicas == pytest.approx(expected["loss"], rel=1e-5)
    assert sum(of_rank["owns_loss"] for of_rank in seen) == replicas
    for of_rank in seen:
        torch.testing.assert_close(of_rank["norm"], expected["norm"], rtol=1e-4, atol=0)
        if of_rank["owns_loss"]:
            for outputs in of_rank["outputs"]:
                torch.testing.assert_close(outputs, expected["outputs"], rtol=1e-4, atol=1e-5)
        else:
            assert of_rank["outputs"] == [None, None]
            assert of_rank["loss"] == 0


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return on_ranks(4, each, step_of, sorted(selected(request, "name")))


@pytest.fixture(scope="module")
def of_eight(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return on_ranks(8, each, step_of, sorted(selected(request, "name")))


#: One weight, and on several stages the head must share one for all its vocabulary.
TIED = ("embedding.token.weight", "head.projection.weight")


@cache
def reference(layers: int) -> dict[str, Any]:
    model = with_weights(gpt(layers=layers))
    loss = model(*data().samples(0, BATCH))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    outputs = model(data().samples(0, 3)[0]).detach()
    gradients[TIED[1]] = gradients[TIED[0]]
    return {"loss": loss.item(), "gradients": gradients, "norm": norm, "outputs": outputs}


def step_of(name: str) -> dict[str, Any]:
    """In a rank: what the last step leaves; each operation on a DTensor takes a CPU long, so that they do fewer passes.

    Nothing may be left of the rehearsal, in which DDP arranges its buckets anew, nor of the step before.
    """
    strategy = (STRATEGIES | SEVERAL | NARROW | PRODUCTS)[name]
    layers = max(4, len(strategy.stage_ranks(strategy.dims(dist.get_world_size()))))
    micro_batch = MICRO_BATCH if strategy.tensor == strategy.context == 1 else 2 * MICRO_BATCH
    engine, layout, replica = laid_out(strategy, gpt(layers=layers), BATCH, micro_batch)
    outputs = [engine.outputs(data().samples(0, 3)[0])]
    engine.rehearse(*data().samples(*layout.rows(2, replica)), unscaled)
    for step in (1, 0):
        engine.module.zero_grad()
        loss = engine.gradients(*data().samples(*layout.rows(step, replica)), unscaled)
    outputs.append(engine.outputs(data().samples(0, 3)[0]))
    return {
        "loss": loss, "owns_loss": engine.owns_loss, "norm": engine.gradient_norm(), "outputs": outputs,
        "layers": layers, "replicas": layout.replicas,
        "gradients": {name: whole(parameter.grad) for name, parameter in engine.module.named_parameters()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "available", "ranks"),
    [({"replicate": "node", "shard": "auto"}, 1, 2), ({"replicate": "auto", "tensor": "node"}, 8, 8),
     ({}, 8, 1), ({"replicate": "auto"}, 8, 8), ({"shard": "auto"}, 8, 8), ({"replicate": 3, "shard": "auto"}, 8, 6),
     ({"replicate": 3, "shard": "auto"}, 2, 3), ({"replicate": 2, "pipeline": 2}, 8, 4)],
)  # fmt: skip
def test_ranks_fit_the_devices(options, available, ranks):
    assert Strategy(**options).ranks(available) == ranks


TP, CP, HSDP = ({"replicate": "auto", "tensor": "node"}, {"shard": "auto", "context": "node"},
                {"replicate": "node", "shard": "auto"})  # fmt: skip


@pytest.mark.parametrize(
    ("options", "ranks", "nodes", "derived"),
    [  # of a model with four heads, 40 tokens and 8 positions
        (TP, 2, 1, Dims(tensor=2)),
        (TP, 8, 1, Dims(replicate=2, tensor=4)),
        (TP, 6, 1, Dims(replicate=3, tensor=2)),
        (TP, 8, 4, Dims(replicate=4, tensor=2)),
        (TP, 3, 1, Dims(tensor=3)),  # which is refused
        (TP | {"pipeline": 2}, 4, 1, Dims(pipeline=2, tensor=2)),
        (TP | {"replicate": 4}, 8, 1, Dims(replicate=4, tensor=2)),
        (TP | {"tensor": "auto"}, 4, 1, Dims(replicate=2, tensor=2)),
        (TP, 1, 1, Dims()),
        (CP, 8, 1, Dims(shard=2, context=4)),
        (CP | {"context_method": "ring"}, 8, 2, Dims(shard=2, context=4)),
        (HSDP, 8, 1, Dims(replicate=2, shard=4)),
        (HSDP, 32, 4, Dims(replicate=4, shard=8)),
        (HSDP | {"pipeline": 2}, 32, 4, Dims(replicate=4, shard=4, pipeline=2)),
    ],
)
def test_degrees_of_a_node(options, ranks, nodes, derived):
    strategy = Strategy(**options)
    assert strategy.dims(ranks, gpt(), nodes) == derived
    assert strategy.shards(derived) == (derived.shard > 1 or derived.tensor > 1 < derived.replicate)


#: What is asked for on one rank, and what is to be there.
ON_ONE_RANK = {
    "single": (Strategy(), "Accumulating", "GPT"),
    "ddp": (Strategy(replicate="auto"), "Accumulating", "DistributedDataParallel"),
    "fsdp": (Strategy(shard="auto"), "Accumulating", "FSDPGPT"),
    "pdp": (Strategy(replicate="auto", pipeline="auto"), "Pipelined", "Stage"),
    **where_split({
        "zbv": lambda: (Strategy(replicate="auto", pipeline="auto", schedule="zbv"), "Pipelined", "Stage"),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_single_rank_still_applies_transforms(name):
    strategy, *expected = ON_ONE_RANK[name]
    with pretended(1):
        engine, *_ = laid_out(strategy, gpt(), 4)
        assert [type(engine).__name__, type(engine.parts[0].runner).__name__] == expected


def pipeline(**options: Any) -> Strategy:
    return Strategy(replicate="auto", **{"pipeline": "auto", **options})


class TestPipeline:
    @pytest.mark.parametrize(("share", "stages"), [(16, 2), (16, 4), (12, 3), (7, 2), (6, 4), (100, 4)])
    def test_automatic_micro_batches_fill_stages(self, share, stages):
        layout = layout_of(pipeline(pipeline=stages), stages, share)
        enough = [number for number in range(2 * stages, share + 1) if share % number == 0]
        assert layout.microbatches == (enough[0] if enough else share)

    @pytest.mark.parametrize(
        "schedule", ["interleaved1f1b", pytest.param("interleaved_zero_bubble", marks=needs_splitting)]
    )
    def test_automatic_micro_batches_fill_rounds(self, schedule):
        strategy = pipeline(schedule=schedule)
        assert layout_of(strategy, 2, 15).microbatches == 15 // 5
        assert layout_of(strategy, 2, 10, 2) == BatchPlan(Dims(pipeline=2), 10, 2, 1, 5)

    def test_costs_are_flops_stated_or_counted(self):
        stated, unstated = on_meta(Toy, inputs=2, width=3, outputs=1, layers=2), untold_by(Chain(), 1)
        assert costs(stated, stated.parts()) == [4 * 6, 6 * 3]
        assert costs(unstated, unstated.parts()) == [2 * 2 * 3, 2 * 3 * 1]
        pipeline().check(unstated, layout_of(pipeline(), 2, 4))  # without layers(), parts are what is counted


class Chain(nn.Module):
    """Says what its parts are, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs))

    def parts(self) -> dict[str, nn.Module]:
        return {"first": self.first, "last": self.last}


def untold_by(module: nn.Module, outputs: int) -> Adapted:
    return Adapted(module, lambda: (torch.ones(1, 2, device="meta"), torch.ones(1, outputs, device="meta")))


def not_causal() -> GPT:
    model = gpt()
    roles = {name: replace(role, is_causal=False) for name, role in model.roles().items()}
    model.roles = lambda: roles  # type: ignore[method-assign]
    return model


def with_frozen_trunk() -> GPT:
    model = gpt().requires_grad_(False)
    model.blocks[-1].requires_grad_()
    return model


def with_gate(gate: Tensor) -> GPT:
    model = gpt()
    model.blocks[1].gate = nn.Parameter(gate)
    return model


def with_equal_layers() -> GPT:
    model = gpt()
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
    return model


@pytest.mark.parametrize(("options", "build", "message"), [
    ({"tensor": 3}, gpt, "tensor=3: must divide the 40 tokens of the model; try 2"),
    ({"tensor": 8}, gpt, "tensor=8: must divide the 4 heads of the model; try 2, 4"),
    ({"tensor": 8, "sequence": True, "context": 2}, gpt, "tensor=8: times 2 … the 8 positions …; try 2, 4"),
    ({"context": 3}, gpt, "context=3: must divide the 8 positions of the model; try 2"),
    ({"context": 8, "context_method": "ring"}, gpt, "context=8: times 2 … 8 positions …, … per rank; try 2, 4"),
    ({"context": 4, "tensor": 2}, gpt, "context=4: times 2 must divide the 4 heads …; try 2"),
    ({"context": 2, "context_method": "ring"}, not_causal, "context_method=ring: … is_causal; try ulysses"),
    ({"tensor": 2, "sequence": True}, lambda: on_meta(Toy), "sequence=true: … scatter…; try false"),
    ({"tensor": 2}, lambda: untold_by(nn.Linear(2, 2), 2), "tensor=2: it has no tp_plan, …; try 1…"),
    ({"context": 2}, lambda: untold_by(nn.Linear(2, 2), 2), "context=2: needs a model whose roles() name …try 1…"),
    ({"pipeline": 8}, gpt, "pipeline=8: … the model's 4 layers; try 2, 4"),
    ({"pipeline": 5}, gpt, "pipeline=5: … 4 layers; try another cluster.ranks_per_node, or parallel=ddp"),
    ({"pipeline": 4, "schedule": "interleaved1f1b"}, gpt, "pipeline=4: pipeline(4) x stages_per_rank(2) = 8 stages "
     "must not exceed the model's 4 layers; try 2, or parallel.schedule=1f1b"),
    ({"pipeline": 2, "schedule": "looped_bfs", "stages_per_rank": 3}, gpt,
     "pipeline=2: pipeline(2) x stages_per_rank(3) = 6 stages … 4 layers; try parallel.schedule=1f1b"),
    *(({"pipeline": 2}, lambda dtype=dtype: untold_by(nn.Linear(2, 2, dtype=dtype), 2), "pipeline=2: … there is "
       f"no place between its submodules …; define parts(), or try parallel=ddp{more}")
      for dtype, more in ((torch.float32, ", parallel=fsdp"), (torch.complex64, ""))),
    ({"pipeline": 2}, with_frozen_trunk, "pipeline=2: stage 0 …; try parallel=fsdp, or fewer stages"),
    ({"shard": 2}, with_equal_layers,
     "shard=2: blocks.0.mlp.up.weight and blocks.1.mlp.up.weight are the same weight, …; try parallel=ddp"),
    ({"shard": 2, "sync_batchnorm": True}, gpt, "sync_batchnorm=true: … without torch's batch norms; try false"),
    *(({"shard": 2}, lambda gate=gate: with_gate(gate), f"shard=2: blocks.1.gate {rule}; try parallel=ddp")
      for gate, rule in (
          (torch.ones(()), "is a scalar, …"),
          (torch.ones(2, dtype=torch.complex64), "is complex, …"),
          (torch.ones(2, 3).t(), "is not contiguous, …: nn.Parameter(weight.contiguous())"))),
])  # fmt: skip
def test_models_refused(options, build, message):
    strategy = Strategy(**options)
    refusal = refused(strategy.check, build(), layout_of(strategy, strategy.ranks(1), 240))
    assert Abridged(message) in (refusal, refusal.splitlines()[0])


@pytest.mark.parametrize(
    ("method", "fits", "not_so", "rule"),
    [("ulysses", 50, 51, "must divide the 51 positions of a sample"),
     ("ring", 48, 50, "times 2 must divide the 50 positions of a sample, two pieces per rank")],
)  # fmt: skip
def test_context_divides_short_samples(method, fits, not_so, rule):
    strategy = Strategy(context=2, context_method=method)
    layout = layout_of(strategy, 2, 16)
    strategy.check_sample(torch.zeros(1, fits), torch.zeros(1, fits), layout)
    samples = torch.zeros(1, not_so), torch.zeros(1, not_so)
    assert refused(strategy.check_sample, *samples, layout) == f"context=2: {rule}; try 1"


def test_context_needs_positions_of_targets():
    strategy, samples = Strategy(context=2), (torch.zeros(1, 8), torch.zeros(1))
    refusal = "context=2: … by position, … [1, 8] and [1]; try 1, or parallel=ddp,fsdp"
    assert refused(strategy.check_sample, *samples, layout_of(strategy, 2, 16)) == Abridged(refusal)
    Strategy(shard=2).check_sample(*samples, layout_of(Strategy(shard=2), 2, 16))
