"""Options that do not go together: what is refused, in which words, and what goes with it all the same."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from ptdbench.parallel.activations import Recompute, Selective
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError, as_typed
from tests.parallel.made import layout_of, refused
from tests.parallel.splitting import needs_splitting
from tests.refusals import Abridged

DDP, FSDP = {"replicate": "auto"}, {"shard": "auto"}
PDP = {**DDP, "pipeline": "auto"}
INTERLEAVED = {**PDP, "schedule": "interleaved1f1b"}
RING = {**DDP, "context": 2, "context_method": "ring"}
STAGES_IN_SHARDS = {"shard": 4, "pipeline": 2}
NO_EFFECT = "has no effect under these degrees of parallelism; it belongs to parallel"
AT_LEAST_1 = "must be a whole number of at least 1"
_1F1B = "parallel.schedule=interleaved1f1b"


def split(*values: Any) -> Any:
    """A row for a torch that splits backward passes."""
    return pytest.param(*values, marks=needs_splitting)


@pytest.mark.parametrize(("options", "name", "value", "rule"), [
    *((DDP, "bucket_mb", size, "must be greater than 0 (MiB); try auto, 25") for size in (0, -1)),
    *(({}, degree, 0, AT_LEAST_1) for degree in ("replicate", "shard", "context", "tensor", "pipeline")),
    *((degrees, "bucket_mb", 50, f"{NO_EFFECT}=ddp,pdp")
      for degrees in ({"shard": 4}, {"replicate": 4, "tensor": 2}, {"context": 2, "shard": 2})),
    ({"replicate": 2, "shard": 2}, "static_graph", False, f"{NO_EFFECT}=ddp,pdp"),
    ({"pipeline": 4}, "gradients", "bf16", f"{NO_EFFECT}=ddp,pdp,fsdp,hsdp"),
    (STAGES_IN_SHARDS, "reduce_scatter_each_microbatch", True, "has no effect under a pipeline, …; try false"),
    ({"shard": 4}, "schedule", "gpipe", f"{NO_EFFECT}=pdp"),
    ({"shard": 4}, "sequence", True, f"{NO_EFFECT}=tp,3d"),
    ({"shard": 4}, "context_method", "ring", f"{NO_EFFECT}=cp"),
    ({"shard": 4}, "optimizer", "zero1", f"{NO_EFFECT}=ddp,pdp"),
    *((degrees, "sync_batchnorm", True, f"{NO_EFFECT}=ddp,pdp,fsdp,hsdp")
      for degrees in ({}, {"pipeline": 2}, {"tensor": 2}, {"context": 2})),
    ({"replicate": 4}, "prefetch", 2, f"{NO_EFFECT}=fsdp,hsdp"),
    ({"shard": 4}, "prefetch", 0, AT_LEAST_1),
    (STAGES_IN_SHARDS, "reshard_after_forward", 2, "… is not supported with pipeline, …; try true, false"),
    (PDP, "stages_per_rank", 2, f"must be 1 under 1f1b; try auto, or {_1F1B}"),
    split({**PDP, "schedule": "dualpipev"}, "stages_per_rank", 3, f"must be 2 under dualpipev; … or {_1F1B}"),
    ({**PDP, "schedule": "looped_bfs"}, "stages_per_rank", 1, "… at least 2 under looped_bfs; try auto, or …=1f1b"),
])  # fmt: skip
def test_options_refused(options, name, value, rule):
    refusal = refused(lambda: Strategy(**options, **{name: value}))
    assert refusal == Abridged(f"{name}={as_typed(value)}: {rule}")


def test_options_are_accepted_iff_effective():
    for sizes in product((1, 2), repeat=6):
        dims = Dims(**dict(zip(Dims.rows(), sizes, strict=True)))
        if dims.shard * dims.context * dims.tensor % dims.expert == 0:
            strategy = Strategy(**dims.degrees())
            assert accepts(dims, prefetch=2) is (strategy.shards(dims) and dims.shards > 1), dims
            assert accepts(dims, sync_batchnorm=True) is (dims.batch > 1), dims
            assert accepts(dims, bucket_mb=5) is strategy.replicates(dims), dims


def accepts(dims: Dims, **options: Any) -> bool:
    try:
        return bool(Strategy(**dims.degrees(), **options))
    except ConfigError:
        return False


def test_context_with_fsdp_accumulates_whole_gradients():
    strategy = Strategy(context=2, tensor=2)
    assert strategy.accumulates_whole(layout_of(strategy, 4, 4, 1))
    assert not strategy.accumulates_whole(layout_of(strategy, 4, 4))
    assert not strategy.accumulates_whole(layout_of(Strategy(context=2), 2, 4, 1))


@pytest.mark.parametrize(("options", "ranks", "batch", "message"), [
    ({**PDP, "microbatches": 5}, 2, (12,), "microbatches=5: must divide … share …, 12; try 3, 4, 6"),
    ({**PDP, "microbatches": 4}, 2, (12, 2), "microbatches=4: must divide the micro-batches …, 6; try 2, 3, 6"),
    *(({**PDP, "microbatches": count}, 2, batch, "microbatches=1: must be at least the number of stages, 2, under "
       f"1f1b; try {remedy}, or parallel.schedule=gpipe") for count, batch, remedy in (
           (1, (16,), "auto"), ("auto", (16, 16), "a smaller train.micro_batch than 16"),
           ("auto", (1,), "a train.global_batch of at least 2"))),
    *(({**PDP, "pipeline": 4}, ranks, (batch,), f"microbatches={count}: … stages, 4, …global_batch of at least "
       f"{ranks}, or parallel.schedule=gpipe") for ranks, batch, count in ((4, 3, 3), (8, 2, 1))),
    *(split({**PDP, "schedule": "dualpipev", "microbatches": count}, 2, (batch,), f"microbatches={value}: … stages, "
            f"4, under dualpipev; try {remedy}, or …") for count, batch, value, remedy in (
                (2, 16, 2, "auto"), ("auto", 3, 3, "a train.global_batch of at least 4"))),
    ({**INTERLEAVED, "microbatches": 5}, 2, (10,), "microbatches=5: must be a multiple of 2 … try auto, or …"),
    *(split({**degrees, "pipeline": 2, "schedule": "zbv"}, ranks, (16,),
            f"reshard_after_forward=true: … under zbv, …; try false, or {_1F1B}")
      for degrees, ranks in (({"shard": 2}, 4), ({"context": 2, "tensor": 2}, 8))),
    *(({**FSDP, "reshard_after_forward": size}, ranks, (16,),
       f"reshard_after_forward={size}: a group size must divide shard({ranks}), …; try {fits}")
      for size, ranks, fits in (
           (3, 4, "true, false, 2"), (4, 4, "true, false, 2"), (1, 2, "true, false"))),
])  # fmt: skip
def test_layouts_refused(options, ranks, batch, message):
    assert refused(layout_of, Strategy(**options), ranks, *batch) == Abridged(message)


WEIGHTS = [torch.nn.Parameter(torch.zeros(1))]
UNSHARDED = {
    "Adafactor": torch.optim.Adafactor(WEIGHTS),
    "Rprop": torch.optim.Rprop(WEIGHTS),
    "SGD with fused=true": torch.optim.SGD(WEIGHTS, fused=True),
    "Adagrad with fused=true": torch.optim.Adagrad(WEIGHTS, fused=True),
}  # fmt: skip


@pytest.mark.parametrize(("options", "name", "value", "message"), [
    (RING, "compile", "whole", "compile=whole: … ring …; try layers, or parallel.context_method=ulysses"),
    (FSDP, "compile", "whole", "compile=whole: … sharded …; try layers, or parallel=ddp"),
    split({**PDP, "schedule": "zbv"}, "compile", "layers", f"compile=layers: …; try false, or {_1F1B}"),
    *(split({**PDP, "schedule": schedule}, "activations", Selective(), f"activations=selective: … {schedule} "
            f"runs two; try recompute, keep, or {_1F1B}")
      for schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")),
    *(({"tensor": "auto"}, "precision", value, f"precision={value}: does not support tensor …; try bf16")
      for value in ("fp8", "fp8_tensorwise")),
    ({**FSDP, "reshard_after_forward": 2}, "precision", "fp8_tensorwise",
     "parallel.reshard_after_forward=2: … fp8; try true, false, or precision=fp8"),
    *((options, "offload", "optimizer_and_weights",
       "offload=optimizer_and_weights: needs sharded weights, …; try parallel=fsdp,hsdp")
      for options in ({}, DDP, PDP, {"context": 2})),
    *((options, "optimizer", value, f"optimizer._target_={name}: … sharded weights …; try adamw, or parallel=ddp")
      for options in (FSDP, {"tensor": "auto"}) for name, value in UNSHARDED.items()),
])  # fmt: skip
def test_other_options_refused(options, name, value, message):
    strategy = Strategy(**options)
    layout = layout_of(strategy, strategy.ranks(4), 16)
    assert refused(strategy.check_option, name, value, layout) == Abridged(message)


@pytest.mark.parametrize(("options", "name", "value"), [
    (RING, "compile", "layers"), (FSDP, "compile", "layers"), (INTERLEAVED, "compile", "layers"),
    *((options, "compile", "whole") for options in ({}, DDP, PDP)),
    *((options, "activations", Selective()) for options in (DDP, PDP)), (PDP, "offload", "none"),
    split({**PDP, "schedule": "zbv"}, "activations", Recompute()),
    ({**FSDP, "reshard_after_forward": 2}, "precision", "fp8"), (FSDP, "precision", "fp8_tensorwise"),
    ({**DDP, "gradients": "fp16"}, "precision", "fp16"), (FSDP, "offload", "optimizer_and_weights"),
    ({"context": 2, "tensor": 2}, "offload", "optimizer_and_weights"),
    (PDP, "optimizer", UNSHARDED["Adafactor"]), (FSDP, "optimizer", torch.optim.SGD(WEIGHTS)),
    (FSDP, "optimizer", torch.optim.AdamW(WEIGHTS, fused=True)),
])  # fmt: skip
def test_other_options_accepted(options, name, value):
    strategy = Strategy(**options)
    strategy.check_option(name, value, layout_of(strategy, strategy.ranks(4), 16))


def test_what_this_torch_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.1+cpu"))
    rule = "needs torch 2.15 or newer (installed: 2.14.1+cpu); try interleaved1f1b, looped_bfs"
    Strategy(**PDP, schedule="looped_bfs")
    assert refused(lambda: Strategy(**PDP, schedule="zbv")) == f"schedule=zbv: {rule}"
