"""What the memory of a step is for, through the product, against what the layout must take."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ptdbench.local_part import plain_tensors
from ptdbench.models.materialize import parameter_count
from ptdbench.models.protocol import module_of
from ptdbench.profiling import perfetto
from ptdbench.profiling.phases import KINDS
from ptdbench.setup import run_spec
from ptdbench.setup.training_spec import TrainingSpec
from ptdbench.training import profile
from tests.conftest import composed, read, record_of
from tests.daily import cases
from tests.shared_ranks import RANKS, carry_out
from tests.training import test_profile
from tests.training.test_profile import PIPELINE

pytestmark = pytest.mark.ranks

TINY = (*test_profile.TINY, "profile.steps=1", "cluster.ranks_per_node=2")


def training(*overrides: str) -> TrainingSpec:
    return run_spec.specify(read(*TINY, *overrides), None).training


def of_kind(record: dict[str, Any], kind: str) -> list[int]:
    return record["memory"]["ranks"][kind]


@cases("layout", [
    ["parallel=ddp"],
    ["parallel=ddp", "precision=bf16"],
    ["parallel=ddp", "parallel.optimizer=zero1"],
    ["parallel=fsdp"],
    ["parallel=fsdp", "precision=bf16", "train.micro_batch=1"],
    ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2", "cluster.ranks_per_node=4"],
    ["parallel=tp", "parallel.sequence=true", "precision=bf16"],
    ["parallel=fsdp", "parallel.context=2", "parallel.shard=1"],
    [*PIPELINE],
    [*PIPELINE, "parallel.schedule=interleaved1f1b", "activations=recompute"],
], daily=[
    ["parallel=ddp", "parallel.optimizer=zero1"],
    ["parallel=tp", "parallel.sequence=true", "precision=bf16"],
    [*PIPELINE],
], ids=" ".join)  # fmt: skip
def test_training_state_takes_what_was_foreseen(shared_run, layout):
    record = shared_run(*TINY, *layout)
    assert record["status"] == "ok", record["error"]
    usage = record["memory"]
    assert list(usage["ranks"]) == list(KINDS)
    assert min(size for sizes in usage["ranks"].values() for size in sizes) >= 0
    assert set(usage["moments"]) <= {"forward", "backward"}
    assert min(of_kind(record, "activations")) > 0
    spec = training(*layout)
    foreseen = [spec.footprints()[spec.layout.dims.stage(rank)] for rank in range(record["world_size"])]
    assert of_kind(record, "weights") == [one.weights for one in foreseen]
    if "parallel.optimizer=zero1" in layout:  # foreseen is the rank with the larger part
        assert max(of_kind(record, "optimizer")) == foreseen[0].optimizer
    else:
        assert of_kind(record, "optimizer") == [one.optimizer for one in foreseen]


def test_gradients_of_ddp_are_its_buckets_from_step_to_step(shared_run):
    size = 4 * parameter_count(module_of(training().model))
    record = shared_run(*TINY, "parallel=ddp")
    assert (of_kind(record, "gradients"), of_kind(record, "communication")) == ([size] * 2, [0] * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_accumulates_whole_gradients(shared_run, precision):
    wide = ("model.layers=12", "model.width=64", "model.vocabulary=256", "parallel=fsdp", f"precision={precision}")
    whole = 4 * parameter_count(module_of(training(*wide).model))
    record = shared_run(*TINY, *wide, "train.micro_batch=1")
    assert max(of_kind(record, "communication")) < whole / 2
    assert whole / 2 < min(of_kind(record, "gradients")) <= max(of_kind(record, "gradients")) <= 1.1 * whole


@pytest.mark.thorough
def test_fsdp_gathers_some_layers_at_a_time_or_keeps_all(shared_run):
    wide = ("model.layers=12", "model.width=64", "model.vocabulary=256", "parallel=fsdp")
    whole = 4 * parameter_count(module_of(training(*wide).model))
    resharded, kept = (
        of_kind(shared_run(*TINY, *wide, f"parallel.reshard_after_forward={after}"), "communication")
        for after in ("true", "false")
    )
    assert max(resharded) < whole < min(kept)


def run_unreadable(configuration: Any, directory: Path) -> None:
    """In a rank: a run in which rank 1 cannot read what the profiler saw of the memory."""

    with pytest.MonkeyPatch.context() as patched:
        if os.environ["RANK"] == "1":
            patched.setattr(profile.allocations, "read", Mock(side_effect=AttributeError("no such field")))
        carry_out(configuration, directory)


def test_a_pass_that_cannot_be_read_costs_nothing_else(tmp_path):
    RANKS.call(2, run_unreadable, composed(*TINY, "parallel=pdp", "profile.trace=true"), tmp_path)
    record = record_of(tmp_path)
    assert (record["status"], record["phases"]["reason"]) == ("ok", None)
    reason = "cannot read the profiler's allocations: AttributeError: no such field"
    assert (record["memory"]["reason"], record["memory"]["ranks"]) == (reason, None)
    passes = {(chunk.rank, chunk.stage, chunk.kind) for chunk in perfetto.read_passes(tmp_path / "trace.json.gz")}
    assert passes == {(rank, rank, kind) for rank in (0, 1) for kind in "FB"}


def test_tensors_without_memory_of_their_own_are_those_that_they_consist_of():
    sparse = torch.eye(3).to_sparse()
    tensors = list(plain_tensors(sparse))
    assert [tensor.shape for tensor in tensors] == [(2, 3), (3,)]
    assert list(plain_tensors(None)) == list(plain_tensors(3)) == []
