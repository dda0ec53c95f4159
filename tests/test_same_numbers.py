"""The same model, seed and global batch give the same losses, however the work is split.

All runs of one world size share their ranks; that a run which starts its own follows too is tested at the end.
"""

from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.zoo import ZOO
from tests.conftest import Record, run_on_shared_ranks
from tests.daily import cases

pytestmark = pytest.mark.ranks

COMMON = ("train.steps=6", "train.global_batch=24", "device=cpu", "cluster.cpus_per_rank=1")
GPT = ("model=gpt_tiny", "model.width=32", "model.sequence_length=16", "model.vocabulary=300")
HUGGING_FACE = {
    "gpt2": ("model.config.n_embd=32", "model.config.n_layer=4"),
    "llama": ("model.config.hidden_size=32", "model.config.intermediate_size=64"),
}
_VECTORS = ("data=synthetic_vectors", "data.inputs=6", "data.outputs=4")
#: Classes of a user, from a module that says nothing of itself to one that says all that it may, and their data.
USERS = {
    "Plain": ("data=synthetic_images", "data.image_size=8", "data.classes=5"),
    "OnlyParts": _VECTORS,
    "Protocol": _VECTORS,
}
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
    **{f"hf_{kind}": (f"model=hf_{kind}_tiny", "data.sequence_length=16", "train.steps=4", "optimizer=sgd",
                      "optimizer.lr=0.5", "train.clip_norm=0.3", *options)
       for kind, options in HUGGING_FACE.items()},
    "vit": ("model=custom", "model._target_=torchvision.models.VisionTransformer", "+model.image_size=32",
            "+model.patch_size=8", "+model.num_layers=4", "+model.num_heads=4", "+model.hidden_dim=64",
            "+model.mlp_dim=128", "+model.num_classes=10", "data=synthetic_images", "data.image_size=32",
            "data.classes=10"),
    "t5": ("model=hf_t5_tiny", "model.config.d_model=32", "model.config.d_kv=8", "model.config.d_ff=64",
           "data.sequence_length=16", "optimizer.lr=1e-2"),
    **{name: ("model=custom", f"model._target_=tests.models.users.{name}", "+model.width=8", "optimizer.lr=1e-2", *data)
       for name, data in USERS.items()},
}  # fmt: skip
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
    ("clipped", 4, "parallel=3d parallel.microbatches=4"),
    ("clipped", 4, "parallel=cp"),
    ("muon", 2, "parallel=ddp parallel.optimizer=zero1 train.micro_batch=2"),
    ("muon", 4, "parallel=fsdp parallel.tensor=2 parallel.sequence=true"),  # matrices are cut in both dimensions
    ("gpt", 2, "parallel=pdp precision=bf16"),
    ("gpt", 2, "parallel=tp activations=offload"),
    ("gpt", 2, "parallel=fsdp compile=layers activations=selective"),
    ("gpt", 2, "parallel=fsdp kernels=torch train.micro_batch=2"),
    ("gpt", 2, "parallel=ddp kernels=torch precision=bf16"),
    ("gpt", 2, "parallel=tp kernels=torch"),
    ("untied", 4, "parallel=pdp"),
    ("hf_gpt2", 2, "parallel=pdp train.micro_batch=3 parallel.microbatches=4"),
    ("hf_llama", 2, "parallel=fsdp train.micro_batch=2"),
    ("hf_llama", 2, "parallel=tp"),
    ("vit", 2, "parallel=pdp train.micro_batch=2"),  # with weights at its root
    ("t5", 3, "parallel=pdp train.micro_batch=2"),  # an encoder's output skips a stage
    *((model, 2, f"parallel={preset} train.micro_batch=2")
      for model, preset in (("Plain", "ddp"), ("Plain", "pdp"), ("Protocol", "fsdp"), ("Protocol", "pdp"))),
]  # fmt: skip
THOROUGH = [
    *((model, 2, options) for model in ("llama", "toy", "untied")
      for options in ("parallel=ddp", "parallel=fsdp train.micro_batch=2")),
    ("llama", 2, "parallel=pdp parallel.schedule=gpipe parallel.microbatches=4"),
    ("toy", 2, "parallel=pdp parallel.microbatches=4"),
    ("resnet", 2, "parallel=fsdp parallel.sync_batchnorm=true"),
    ("clipped", 8, "parallel=3d parallel.microbatches=4"),
    ("clipped", 4, "parallel=fsdp parallel.pipeline=2 parallel.microbatches=4 train.micro_batch=1"),
    ("clipped", 4, "parallel=fsdp parallel.context=2"),
    ("clipped", 4, "parallel=tp parallel.sequence=true train.micro_batch=4"),
    ("clipped", 8, "parallel=hsdp parallel.pipeline=2 parallel.microbatches=3"),
    *(("muon", 4, f"parallel={preset}") for preset in ("ddp", "fsdp", "hsdp", "pdp")),
    ("muon", 2, "parallel=tp"),
    ("muon", 2, "parallel=fsdp offload=optimizer_and_weights train.clip_norm=1e3"),
    *(("gpt", 2, f"parallel={preset} precision=bf16") for preset in ("ddp", "fsdp")),
    *(("gpt", 2, f"parallel={preset} precision=fp16") for preset in ("ddp", "fsdp", "pdp")),
    *(("gpt", 2, f"parallel=fsdp activations={kept}") for kept in ("recompute", "offload")),
    *(("gpt", ranks, f"parallel={preset} activations=selective") for preset, ranks in (("ddp", 2), ("pdp", 4))),
    *(("gpt", 2, f"parallel={preset} kernels=torch precision=fp16") for preset in ("ddp", "fsdp", "pdp")),
    ("llama", 4, "parallel=fsdp kernels=torch parallel.tensor=2 parallel.sequence=true precision=bf16"),
    ("gpt", 2, "parallel=tp kernels=torch compile=layers"),
    ("gpt", 2, "parallel=ddp compile=layers activations=offload"),
    ("gpt", 4, "parallel=pdp compile=layers activations=recompute"),
    ("gpt", 2, "parallel=ddp compile=whole"),
    ("gpt", 4, "parallel=pdp compile=whole activations=selective"),
    ("hf_gpt2", 2, "parallel=fsdp train.micro_batch=2"),
    ("hf_llama", 4, "parallel=tp"),
    ("hf_llama", 4, "parallel=3d"),
    ("t5", 4, "parallel=fsdp parallel.pipeline=2 train.micro_batch=2"),
    ("vit", 2, "parallel=tp"),
    ("hf_llama", 2, "parallel=pdp train.micro_batch=3 parallel.microbatches=4"),
    *((f"hf_{kind}", ranks, options) for kind in HUGGING_FACE for ranks, options in (
        (2, "parallel=ddp train.micro_batch=2"), (4, "parallel=hsdp"),
        (4, "parallel=pdp parallel.schedule=gpipe parallel.pipeline=4"),
        (4, "parallel=fsdp parallel.pipeline=2 parallel.microbatches=4"))),
    *((model, 2, f"parallel={preset} train.micro_batch=2")
      for model, preset in (("Plain", "fsdp"), ("Protocol", "ddp"), ("OnlyParts", "fsdp"), ("OnlyParts", "pdp"))),
]  # fmt: skip
#: Of the table of docs/zoo.md, without what only timm has.
FEW = ["CLIP", "Swin"]
SOME = ["Llama", "Whisper", "GPT2", "Falcon", "Mixtral", "Mamba", "DeBERTa-v2", "BART", "DenseNet", "MobileNet-v2"]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    @cache
    def trained(model: str, *overrides: str) -> Record:
        words = (*COMMON, *MODELS[model], *overrides, "parallel=single")
        record = run_on_shared_ranks(tmp_path_factory.mktemp("single"), *words)
        assert record["status"] == "ok", record["error"]
        return record

    return trained


@cases("model", MODELS, daily=["gpt"])
def test_wrong_gradients_would_show(single, model):
    """What a model learns in a run is a hundred times the tolerance."""
    losses, idle = single(model)["losses"], single(model, "optimizer.lr=0")["losses"]
    assert max(abs(loss / other - 1) for loss, other in zip(losses, idle, strict=True)) > 1e-3


def check(run: Callable[..., Record], expected: Record, model: str, ranks: int, options: str) -> None:
    record = run(*COMMON, *MODELS[model], f"cluster.ranks_per_node={ranks}", *options.split())
    assert record["status"] == "ok", record["error"]
    assert record["world_size"] == ranks
    assert record["losses"] == pytest.approx(expected["losses"], rel=2e-2 if "precision" in options else 1e-5)
    assert record["parameters"] == expected["parameters"]
    if expected["gradient_norms"]:
        assert record["gradient_norms"] == pytest.approx(expected["gradient_norms"], rel=1e-4)


@cases(("model", "ranks", "options"), [*DAILY, *THOROUGH], daily=DAILY)
def test_losses_follow_the_single_process(shared_run, single, model, ranks, options):
    check(shared_run, single(model), model, ranks, options)


def test_scaled_losses_are_clipped_by_true_gradients(shared_run, single):
    whole = single("clipped")
    assert min(whole["gradient_norms"]) > 0.6  # far above the limit
    free = shared_run(*COMMON, *MODELS["clipped"], "parallel=single", "train.clip_norm=null")
    assert free["gradient_norms"] == []
    assert abs(whole["losses"][-1] / free["losses"][-1] - 1) > 1e-2
    scaled = shared_run(*COMMON, *MODELS["clipped"], "parallel=fsdp", "precision=fp16")
    assert scaled["status"] == "ok", scaled["error"]
    assert scaled["gradient_norms"][0] == pytest.approx(whole["gradient_norms"][0], rel=2e-2)


def test_equal_seeds_give_equal_runs(shared_run):
    options = (*COMMON, "model=gpt_tiny", "model.width=32", "train.steps=4", "train.clip_norm=1")
    one, two, other = (shared_run(*options, f"seed={seed}")["losses"] for seed in (1, 1, 2))
    assert one == two
    assert one != other


@cases("model", [*FEW, *SOME], daily=FEW)
def test_public_architectures_follow_the_single_process(shared_run, model):
    whole, *others = (shared_run(*ZOO.words(model, column)) for column in ("single", "fsdp", "pdp"))
    assert all(norm > 1e-2 for norm in whole["gradient_norms"])  # none without clipping
    for record in others:
        assert record["status"] == "ok", record["error"]
        assert record["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert record["gradient_norms"] == pytest.approx(whole["gradient_norms"], rel=1e-5)


@cases("preset", ["ddp", "fsdp", "pdp"], daily=["fsdp"])
def test_own_ranks_follow_the_single_process(run, single, preset):
    check(run, single("gpt"), "gpt", 2, f"parallel={preset}")


#: Held-out samples come in batches of another size than the pipeline's.
NARROW = (
    *COMMON, *MODELS["hf_llama"], "train.global_batch=16", "precision=bf16", "activations=recompute", "eval.every=2",
    "data.held_out=0.001", "eval.micro_batch=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run_on_shared_ranks(tmp_path_factory.mktemp("narrow"), *NARROW, "parallel=single")


@cases("options", [
    "parallel=fsdp train.micro_batch=2",
    "parallel=pdp train.micro_batch=2 parallel.microbatches=4",
    "parallel=fsdp parallel.pipeline=2 parallel.microbatches=4 cluster.ranks_per_node=4",
], daily=["parallel=fsdp train.micro_batch=2"])  # fmt: skip
def test_narrow_evaluations_follow_the_single_process(shared_run, narrow, options):
    record = shared_run(*NARROW, *options.split())
    assert record["error"] is None
    assert record["losses"] == pytest.approx(narrow["losses"], rel=2e-2)
    losses = [evaluation["loss"] for evaluation in record["evaluations"]]
    assert losses == pytest.approx([evaluation["loss"] for evaluation in narrow["evaluations"]], rel=2e-2)


def test_a_users_model_has_its_name_and_counted_flops(single):
    """Two products for the convolution, whose input needs no gradient, and three for the linear layer."""
    record = single("Plain")
    flops = record["metrics"]["model_flops_per_second"] / record["metrics"]["samples_per_second"]
    assert record["model"] == "Plain"
    assert flops == pytest.approx(2 * (2 * 3 * 9 * 8 * 64) + 3 * (2 * 8 * 64 * 5), rel=1e-6)
