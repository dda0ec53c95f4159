"""The same model, seed and global batch give the same losses, however the work is split.

All runs of one world size share their ranks; that a run which starts its own follows too is tested at the end.
"""

from collections.abc import Callable
from functools import cache

import pytest

from tests.conftest import Record, run_on_shared_ranks
from tests.daily import cases

pytestmark = pytest.mark.ranks

COMMON = ("train.steps=6", "train.global_batch=24", "device=cpu", "cluster.cpus_per_rank=1")
GPT = ("model=gpt_tiny", "model.width=32", "model.sequence_length=16", "model.vocabulary=300")
#: What one rank is asked for, too.
MODELS = {
    "gpt": GPT,
    "untied": (*GPT, "model.tie_weights=false"),
    "llama": ("model=llama_tiny", "model.width=32", "model.hidden=48", "model.sequence_length=16"),
    "toy": ("model=toy", "optimizer.lr=3e-2"),
    # Where a gradient is nearly zero, Adam makes a full step of the sign of its rounding error, and batch norm over few
    # pixels amplifies that: at lr=1e-4 a single process with two threads instead of one is off by 1e-3 after ten steps.
    "resnet": ("model=resnet18", "model.image_size=32", "model.classes=10", "optimizer.lr=1e-6"),
    # The norms tell the scale of gradients, which neither clipping nor Adam would.
    "clipped": (*GPT, "optimizer=sgd", "optimizer.lr=0.5", "train.clip_norm=0.3", "train.steps=4"),
    "muon": (*GPT, "optimizer=muon", "optimizer.lr=0.02", "optimizer.adamw_lr=1e-3", "train.steps=10"),
}
#: The model, ranks, and how they share the work: tests/parallel/test_strategy.py looks at every layout. A replica's
#: share is 12 samples on two ranks.
DAILY = [
    ("gpt", 3, "parallel=ddp train.micro_batch=2"),
    ("gpt", 2, "parallel=fsdp train.micro_batch=2"),
    ("gpt", 4, "parallel=hsdp"),
    ("gpt", 3, "parallel=pdp train.micro_batch=2"),  # three stages of one replica
    ("llama", 2, "parallel=pdp parallel.microbatches=4"),
    ("toy", 2, "parallel=pdp parallel.schedule=gpipe parallel.microbatches=4"),
    ("resnet", 3, "parallel=ddp parallel.sync_batchnorm=true"),
    ("clipped", 8, "parallel=3d parallel.microbatches=4"),
    ("clipped", 4, "parallel=fsdp parallel.context=2"),
    ("muon", 2, "parallel=ddp parallel.optimizer=zero1 train.micro_batch=2"),
    ("muon", 4, "parallel=fsdp parallel.tensor=2 parallel.sequence=true"),  # matrices are cut in both dimensions
    ("gpt", 2, "parallel=pdp precision=bf16"),
    ("gpt", 2, "parallel=tp activations=offload"),
    ("gpt", 2, "parallel=fsdp compile=layers activations=selective"),
    ("untied", 4, "parallel=pdp"),
]
THOROUGH = [
    *((model, 2, options) for model in ("llama", "toy", "untied")
      for options in ("parallel=ddp", "parallel=fsdp train.micro_batch=2")),
    ("llama", 2, "parallel=pdp parallel.schedule=gpipe parallel.microbatches=4"),
    ("toy", 2, "parallel=pdp parallel.microbatches=4"),
    ("resnet", 2, "parallel=fsdp parallel.sync_batchnorm=true"),
    ("clipped", 4, "parallel=fsdp parallel.pipeline=2 parallel.microbatches=4 train.micro_batch=1"),
    ("clipped", 4, "parallel=tp parallel.sequence=true train.micro_batch=4"),
    ("clipped", 8, "parallel=hsdp parallel.pipeline=2 parallel.microbatches=3"),
    *(("muon", 4, f"parallel={preset}") for preset in ("ddp", "fsdp", "hsdp", "pdp")),
    ("muon", 2, "parallel=tp"),
    ("muon", 2, "parallel=fsdp offload=optimizer_and_weights train.clip_norm=1e3 train.ema=0.9"),
    *(("gpt", 2, f"parallel={preset} precision=bf16") for preset in ("ddp", "fsdp")),
    *(("gpt", 2, f"parallel={preset} precision=fp16") for preset in ("ddp", "fsdp", "pdp")),
    *(("gpt", 2, f"parallel=fsdp activations={kept}") for kept in ("recompute", "offload")),
    *(("gpt", ranks, f"parallel={preset} activations=selective") for preset, ranks in (("ddp", 2), ("pdp", 4))),
    ("gpt", 2, "parallel=ddp compile=layers activations=offload"),
    ("gpt", 4, "parallel=pdp compile=layers activations=recompute"),
    ("gpt", 2, "parallel=ddp compile=whole"),
    ("gpt", 4, "parallel=pdp compile=whole activations=selective"),
]  # fmt: skip


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """The record of one rank with the same model, which runs once."""

    def run(*overrides: str) -> Record:
        record = run_on_shared_ranks(tmp_path_factory.mktemp("single"), *COMMON, *overrides, "parallel=single")
        assert record["status"] == "ok", record["error"]
        return record

    @cache
    def trained(model: str) -> Record:
        record, idle = run(*MODELS[model]), run(*MODELS[model], "optimizer.lr=0", "train.steps=2")
        moved = abs(record["losses"][1] / idle["losses"][1] - 1)
        assert moved > 1e-3  # a hundred times the tolerance: wrong gradients would show
        return record

    return trained


def check(run: Callable[..., Record], expected: Record, model: str, ranks: int, options: str) -> None:
    record = run(*COMMON, *MODELS[model], f"cluster.ranks_per_node={ranks}", *options.split())
    assert record["status"] == "ok", record["error"]
    assert record["world_size"] == ranks
    assert record["losses"] == pytest.approx(expected["losses"], rel=2e-2 if "precision" in options else 1e-5)
    if expected["gradient_norms"]:
        assert record["gradient_norms"] == pytest.approx(expected["gradient_norms"], rel=1e-4)


@cases(("model", "ranks", "options"), [*DAILY, *THOROUGH], daily=DAILY)
def test_losses_follow_the_single_process(shared_run, single, model, ranks, options):
    check(shared_run, single(model), model, ranks, options)


def test_losses_that_are_scaled_are_clipped_by_their_true_gradient(shared_run, single):
    whole = single("clipped")
    assert min(whole["gradient_norms"]) > 0.6  # far above the limit
    free = shared_run(*COMMON, *MODELS["clipped"], "parallel=single", "train.clip_norm=null")
    assert free["gradient_norms"] == []
    assert abs(whole["losses"][-1] / free["losses"][-1] - 1) > 1e-2
    scaled = shared_run(*COMMON, *MODELS["clipped"], "parallel=fsdp", "precision=fp16")
    assert scaled["status"] == "ok", scaled["error"]
    assert scaled["gradient_norms"][0] == pytest.approx(whole["gradient_norms"][0], rel=2e-2)


def test_two_runs_of_one_seed_are_equal_and_of_another_are_not(shared_run):
    options = (*COMMON, "model=gpt_tiny", "model.width=32", "train.steps=4", "train.ema=0.9", "train.clip_norm=1")
    one, two, other = (shared_run(*options, f"seed={seed}")["losses"] for seed in (1, 1, 2))
    assert one == two
    assert one != other


@cases("preset", ["ddp", "fsdp", "pdp"], daily=["fsdp"])
def test_a_run_that_starts_its_own_ranks_follows_too(run, single, preset):
    check(run, single("gpt"), "gpt", 2, f"parallel={preset}")
