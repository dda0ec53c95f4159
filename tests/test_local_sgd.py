"""Runs whose copies average their weights every few steps: the same under every layout, whatever else they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Record, run_on_shared_ranks
from tests.workloads.made_task import TASK

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

EVERY = 3
COPIES = (*TASK, "parallel=ddp", "cluster.ranks_per_node=3", f"parallel.local_steps={EVERY}", "train.ema=0.8")
GPT = (
    "model=gpt_tiny", "model.width=32", "model.sequence_length=16", "model.vocabulary=300", "train.global_batch=24",
    "train.steps=7", "train.clip_norm=0.5", "device=cpu", "cluster.cpus_per_rank=1", f"parallel.local_steps={EVERY}",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A run that only trains."""
    return run_on_shared_ranks(tmp_path_factory.mktemp("plain"), *COPIES, "train.steps=8")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """One that ends between two averages."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, run_on_shared_ranks(folder, *COPIES, "train.steps=5", "checkpoint.every_steps=5")


def test_another_layout_goes_on_with_the_mean(plain, stopped, shared_run):
    folder, known = stopped
    others = ("parallel=ddp", "parallel=fsdp")
    averaging, sharded = (
        shared_run(*COPIES, "train.steps=8", "parallel.local_steps=1", other, f"resume={folder}") for other in others
    )
    for record in (averaging, sharded):
        assert record["status"] == "ok", record["error"]
        assert record["losses"][:5] == known["losses"]
        assert record["losses"][5] != plain["losses"][5]
    assert averaging["losses"] == pytest.approx(sharded["losses"], rel=1e-5)


def test_what_is_timed_are_whole_periods(plain):
    assert plain["warmup_steps"] == EVERY
    timed = [sum(of_rank[EVERY : 2 * EVERY]) for of_rank in plain["rank_step_seconds"]]
    assert plain["metrics"]["step_seconds"]["mean"] == pytest.approx(max(timed) / EVERY)
    assert plain["metrics"]["samples_per_second"] == pytest.approx(24 * EVERY / max(timed))


LAYOUTS = {
    "hsdp": ("parallel=hsdp", "parallel.replicate=2", "cluster.ranks_per_node=4"),
    "hsdp with context": ("parallel=hsdp", "parallel.replicate=2", "parallel.context=2", "cluster.ranks_per_node=8"),
    "tensor": ("parallel=tp", "parallel.tensor=2", "parallel.sequence=true", "cluster.ranks_per_node=4"),
    "tensor and shards": ("parallel=hsdp", "parallel.replicate=2", "parallel.tensor=2", "cluster.ranks_per_node=8"),
    "stages": ("parallel=pdp", "parallel.pipeline=2", "parallel.microbatches=4", "cluster.ranks_per_node=4"),
    "compiled": ("parallel=ddp", "compile=layers", "cluster.ranks_per_node=2"),
    "offloaded": (
        "parallel=hsdp", "parallel.replicate=2", "offload=optimizer_and_weights", "cluster.ranks_per_node=4"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def two_copies(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("copies")
    losses = run_on_shared_ranks(folder, *GPT, "parallel=ddp", "cluster.ranks_per_node=2")["losses"]
    assert abs(losses[1] / losses[0] - 1) > 1e-3  # a hundred times the tolerance
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_copies_are_the_same_under_every_layout(layout, two_copies, shared_run: Callable[..., Record]):
    record = shared_run(*GPT, *LAYOUTS[layout])
    assert record["status"] == "ok", record["error"]
    assert record["losses"] == pytest.approx(two_copies, rel=1e-5)
