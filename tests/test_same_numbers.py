"""The same model, seed and global batch give the same losses, however the work is split.

All runs of one world size share their ranks; that a run which starts its own follows too is tested at the end.
"""

from collections.abc import Callable

import pytest

from tests.conftest import Record, run_on_shared_ranks
from tests.daily import cases

pytestmark = pytest.mark.ranks

COMMON = ("train.steps=6", "train.global_batch=24", "device=cpu", "cluster.cpus_per_rank=1")
MODELS = {
    "gpt": ("model=gpt_tiny", "model.width=32", "model.sequence_length=16", "model.vocabulary=300"),
    "llama": ("model=llama_tiny", "model.width=32", "model.hidden=48", "model.sequence_length=16"),
    "toy": ("model=toy", "optimizer.lr=3e-2"),
    # Where a gradient is nearly zero, Adam makes a full step of the sign of its rounding error, and batch norm over few
    # pixels amplifies that: at lr=1e-4 a single process with two threads instead of one is off by 1e-3 after ten steps.
    "resnet": ("model=resnet18", "model.image_size=32", "model.classes=10", "optimizer.lr=1e-6"),
}
REFERENCES: dict[tuple[str, ...], list[float]] = {}


@pytest.fixture
def single(shared_run: Callable[..., Record]) -> Callable[..., list[float]]:
    """Losses of one rank with the same options; each set is run once."""

    def losses(*overrides: str) -> list[float]:
        if overrides not in REFERENCES:
            record = shared_run(*COMMON, *overrides, "parallel=single")
            assert record["status"] == "ok", record["error"]
            idle = shared_run(*COMMON, *overrides, "parallel=single", "optimizer.lr=0", "train.steps=2")
            moved = abs(record["losses"][1] / idle["losses"][1] - 1)
            assert moved > 1e-3  # a hundred times the tolerance: wrong gradients would show
            REFERENCES[overrides] = record["losses"]
        return REFERENCES[overrides]

    return losses


STRATEGIES = {
    "ddp": ("parallel=ddp",),
    "fsdp": ("parallel=fsdp",),
    "hsdp": ("parallel=hsdp",),
    "gpipe": ("parallel=pdp", "parallel.schedule=gpipe"),
    "1f1b": ("parallel=pdp", "parallel.schedule=1f1b"),
}
PIPELINES = ("gpipe", "1f1b")
#: By name the strategy, ranks, and samples of a micro-batch: tests/parallel/test_strategy.py looks at every layout.
LAYOUTS = {
    "ddp-2": ("ddp", 2),
    "ddp-3-accumulated": ("ddp", 3, "train.micro_batch=2"),
    "fsdp-2-accumulated": ("fsdp", 2, "train.micro_batch=2"),
    "fsdp-3": ("fsdp", 3),
    "hsdp-4": ("hsdp", 4),
    "gpipe-2": ("gpipe", 2, "parallel.microbatches=4"),
    "gpipe-4-accumulated": ("gpipe", 4, "train.micro_batch=1", "parallel.microbatches=4"),
    "1f1b-2": ("1f1b", 2, "parallel.microbatches=4"),
    "1f1b-3-micro": ("1f1b", 3, "train.micro_batch=2", "parallel.microbatches=auto"),  # three stages of one replica
    "1f1b-4-accumulated": ("1f1b", 4, "train.micro_batch=1", "parallel.microbatches=4"),
}
#: What a model without shared weights adds shows on two ranks.
FOLLOWING = [(model, name) for model in ("gpt", "llama", "toy") for name in LAYOUTS if model == "gpt" or "2" in name]

#: Where it is about the stages and not about their order.
ONE_SCHEDULE = ("ddp", "fsdp", "1f1b")


CLIPPED = (*COMMON, *MODELS["gpt"], "optimizer=sgd", "optimizer.lr=0.5", "train.steps=4")


def check(run: Callable[..., Record], expected: list[float], ranks: int, tolerance: float, *overrides: str) -> Record:
    record = run(*COMMON, f"cluster.ranks_per_node={ranks}", *overrides)
    assert record["status"] == "ok", record["error"]
    assert record["world_size"] == ranks
    assert record["losses"] == pytest.approx(expected, rel=tolerance)
    return record


@cases(
    ("model", "layout"),
    FOLLOWING,
    daily=[
        ("gpt", "ddp-3-accumulated"), ("gpt", "fsdp-2-accumulated"), ("gpt", "hsdp-4"), ("gpt", "1f1b-3-micro"),
        ("llama", "1f1b-2"), ("toy", "gpipe-2"),
    ],
)  # fmt: skip
def test_fp32_losses_follow_the_single_process(shared_run, single, model, layout) -> None:
    strategy, ranks, *batching = LAYOUTS[layout]
    check(shared_run, single(*MODELS[model]), ranks, 1e-5, *MODELS[model], *STRATEGIES[strategy], *batching)


#: Products of degrees, with their ranks; a replica's share is 12 samples on four ranks, and 6 on eight.
PRODUCTS = {
    "shard-pipeline-accumulated": (4, "parallel=fsdp", "parallel.pipeline=2", "train.micro_batch=1",
                                   "parallel.microbatches=4"),
    "tensor-sequence": (4, "parallel=tp", "parallel.sequence=true", "train.micro_batch=4"),
    "tensor-shard-pipeline": (8, "parallel=3d", "parallel.microbatches=4"),
    "context-shard": (4, "parallel=fsdp", "parallel.context=2"),
    "replicate-shard-pipeline": (8, "parallel=hsdp", "parallel.pipeline=2", "parallel.microbatches=3"),
}  # fmt: skip


@cases("name", PRODUCTS, daily=["tensor-shard-pipeline", "context-shard"])
def test_products_of_degrees_follow_too_and_clip_alike(shared_run, whole, name):
    """The norms tell the scale of gradients, which neither clipping nor Adam would."""
    ranks, *options = PRODUCTS[name]
    clipped = (*CLIPPED, "train.clip_norm=0.3")
    record = check(shared_run, whole["losses"], ranks, 1e-5, *clipped, *options)
    assert record["gradient_norms"] == pytest.approx(whole["gradient_norms"], rel=1e-4)


#: Whole matrices, shards of them, and what cuts them in both dimensions.
OF_MUON = {
    **{name: (4, *options) for name, options in STRATEGIES.items() if name != "gpipe"},
    "zero1": (2, "parallel=ddp", "parallel.optimizer=zero1", "train.micro_batch=2"),
    "tensor": (2, "parallel=tp"),
    "tensor-shard": (4, "parallel=fsdp", "parallel.tensor=2", "parallel.sequence=true"),
    "host": (2, "parallel=fsdp", "offload=optimizer_and_weights", "train.clip_norm=1e3", "train.ema=0.9"),
}


@cases("strategy", OF_MUON, daily=["zero1", "tensor-shard"])
def test_muon_orthogonalizes_whole_matrices(shared_run, single, strategy):
    ranks, *options = OF_MUON[strategy]
    muon = (*MODELS["gpt"], "optimizer=muon", "optimizer.lr=0.02", "optimizer.adamw_lr=1e-3", "train.steps=10")
    check(shared_run, single(*muon), ranks, 1e-5, *muon, *options)


@cases("strategy", ONE_SCHEDULE, daily=["1f1b"])
@cases("precision", ["bf16", "fp16"], daily=["bf16"])
def test_narrow_formats_stay_near_fp32(shared_run, single, strategy, precision) -> None:
    check(shared_run, single(*MODELS["gpt"]), 2, 2e-2, *MODELS["gpt"], *STRATEGIES[strategy], f"precision={precision}")


#: What a layer keeps for the backward pass, eager and compiled, and weights of which no two are one.
OPTIONS = {
    **{f"{kept}-{name}": (name, f"activations={kept}") for kept, name in [
        ("recompute", "fsdp"), ("selective", "ddp"), ("selective", "1f1b"), ("offload", "fsdp"), ("offload", "tensor"),
    ]},
    "compiled-ddp": ("ddp", "compile=layers", "activations=offload"),
    "compiled-fsdp": ("fsdp", "compile=layers", "activations=selective"),
    "compiled-1f1b": ("1f1b", "compile=layers", "activations=recompute"),
    "whole-ddp": ("ddp", "compile=whole"),
    "whole-1f1b": ("1f1b", "compile=whole", "activations=selective"),
    **{f"untied-{name}": (name, "model.tie_weights=false") for name in ONE_SCHEDULE},
}  # fmt: skip


@cases("name", OPTIONS, daily=["offload-tensor", "compiled-fsdp", "untied-1f1b"])
def test_options_change_the_cost_and_not_the_numbers(shared_run, single, name) -> None:
    strategy, *options = OPTIONS[name]
    reference = single(*MODELS["gpt"], *(option for option in options if option.startswith("model.")))
    layout = {**STRATEGIES, "tensor": ("parallel=tp",)}[strategy]
    check(shared_run, reference, 4 if strategy in PIPELINES else 2, 1e-5, *MODELS["gpt"], *layout, *options)


@cases(("strategy", "ranks"), [("ddp", 3), ("fsdp", 2)], daily=[("ddp", 3)])
def test_resnet_with_synchronized_batchnorm(shared_run, single, strategy, ranks) -> None:
    synchronized = (*STRATEGIES[strategy], "parallel.sync_batchnorm=true")
    check(shared_run, single(*MODELS["resnet"]), ranks, 1e-5, *MODELS["resnet"], *synchronized)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One rank that clips; the limit matters to the losses."""
    clipped, free = (
        run_on_shared_ranks(tmp_path_factory.mktemp("whole"), *CLIPPED, "parallel=single", f"train.clip_norm={norm}")
        for norm in ("0.3", "null")
    )
    assert min(clipped["gradient_norms"]) > 0.6  # far above the limit
    assert free["gradient_norms"] == []
    assert abs(clipped["losses"][-1] / free["losses"][-1] - 1) > 1e-2
    return clipped


def test_losses_that_are_scaled_are_clipped_by_their_true_gradient(shared_run, whole):
    record = shared_run(*CLIPPED, "parallel=fsdp", "train.clip_norm=0.3", "precision=fp16")
    assert record["status"] == "ok", record["error"]
    assert record["gradient_norms"][0] == pytest.approx(whole["gradient_norms"][0], rel=2e-2)


def test_two_runs_of_one_seed_are_equal_and_of_another_are_not(shared_run):
    options = (*COMMON, "model=gpt_tiny", "model.width=32", "train.steps=4", "train.ema=0.9", "train.clip_norm=1")
    one, two, other = (shared_run(*options, f"seed={seed}")["losses"] for seed in (1, 1, 2))
    assert one == two
    assert one != other


@cases("strategy", ONE_SCHEDULE, daily=["fsdp"])
def test_a_run_that_starts_its_own_ranks_follows_too(run, single, strategy):
    check(run, single(*MODELS["gpt"]), 2, 1e-5, *MODELS["gpt"], *STRATEGIES[strategy])
