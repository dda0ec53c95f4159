"""Models of Hugging Face as they are, under every layout: the losses and gradients of one process."""

from itertools import product

import pytest

from tests.conftest import run_on_shared_ranks
from tests.daily import cases

pytestmark = pytest.mark.ranks

COMMON = (
    "data.sequence_length=16", "train.steps=4", "train.global_batch=16", "device=cpu", "cluster.cpus_per_rank=1",
    "optimizer=sgd", "optimizer.lr=0.5", "train.clip_norm=0.3",
)  # fmt: skip
MODELS = {
    "gpt2": ("model=hf_gpt2_tiny", "model.config.n_embd=32", "model.config.n_layer=4"),
    "llama": ("model=hf_llama_tiny", "model.config.hidden_size=32", "model.config.intermediate_size=64"),
}
LAYOUTS = {
    "ddp": ("parallel=ddp", "train.micro_batch=2"),
    "fsdp": ("parallel=fsdp", "train.micro_batch=2"),
    "hsdp": ("parallel=hsdp", "cluster.ranks_per_node=4"),
    "1f1b": ("parallel=pdp", "train.micro_batch=2", "parallel.microbatches=4"),
    "gpipe": ("parallel=pdp", "parallel.schedule=gpipe", "cluster.ranks_per_node=4", "parallel.pipeline=4"),
    "shard-pipeline": ("parallel=fsdp", "parallel.pipeline=2", "parallel.microbatches=4", "cluster.ranks_per_node=4"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each model in one process."""
    found = {
        name: run_on_shared_ranks(tmp_path_factory.mktemp(name), *COMMON, *options, "parallel=single")
        for name, options in MODELS.items()
    }
    for record in found.values():
        assert record["error"] is None
        assert min(record["gradient_norms"]) > 0.6  # far above the limit
        assert record["losses"][-1] < record["losses"][0] - 0.01  # it moved: wrong gradients would show
    return found


@cases(("model", "layout"), list(product(MODELS, LAYOUTS)), daily=[("gpt2", "1f1b"), ("llama", "fsdp")])
def test_every_layout_follows_one_process(shared_run, alone, model, layout):
    record = shared_run(*COMMON, *MODELS[model], *LAYOUTS[layout])
    assert record["error"] is None
    assert record["losses"] == pytest.approx(alone[model]["losses"], rel=1e-5)
    assert record["gradient_norms"] == pytest.approx(alone[model]["gradient_norms"], rel=1e-4)
    assert record["parameters"] == alone[model]["parameters"]


#: Held-out samples come in batches of another size than the pipeline's.
NARROW = (
    *COMMON, *MODELS["llama"], "precision=bf16", "activations=recompute", "eval.every=2", "data.held_out=0.001",
    "eval.micro_batch=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_on_shared_ranks(tmp_path_factory.mktemp("whole"), *NARROW, "parallel=single")


@cases("layout", ["fsdp", "1f1b", "shard-pipeline"], daily=["fsdp"])
def test_narrow_arithmetic_recomputation_and_evaluation_work_too(shared_run, whole, layout):
    record = shared_run(*NARROW, *LAYOUTS[layout])
    assert record["error"] is None
    assert record["losses"] == pytest.approx(whole["losses"], rel=2e-2)
    found = [one["loss"] for one in record["evaluations"]]
    assert found == pytest.approx([one["loss"] for one in whole["evaluations"]], rel=2e-2)
