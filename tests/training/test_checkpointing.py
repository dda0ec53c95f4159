"""Checkpoints of a run: what its steps wait for."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ptdbench.checkpoints.saver import Saver, Staging
from ptdbench.workloads import train
from tests.conftest import composed
from tests.parallel.ranks import on_ranks
from tests.workloads.made_job import job

SAVING = (
    "model=toy", "device=cpu", "parallel=single", "cluster.ranks_per_node=1", "train.global_batch=4", "train.steps=3",
    "checkpoint.every_steps=2", "profile.steps=0",
)  # fmt: skip


def noted(directory: Path) -> tuple[list[str], list[set[str]]]:
    """In a rank: copies, settling and updates of a run in their order, and what each copy does not take as steady."""
    order: list[str] = []
    unsteady: list[set[str]] = []
    copied = Staging.__call__

    def copy(self: Staging, tensors: Mapping[str, Tensor], steady: Container[str] = ()) -> Any:
        order.append("copy")
        unsteady.append({name for name in tensors if name not in steady})
        return copied(self, tensors, steady)

    hook = register_optimizer_step_pre_hook(lambda *_: order.append("update"))
    settling = mock.patch.object(Staging, "settle", side_effect=lambda: order.append("settle"))
    with settling, mock.patch.object(Staging, "__call__", copy):
        assert train.Train()(job(directory, composed(*SAVING))).error is None
    hook.remove()
    return order, unsteady


@pytest.mark.ranks
def test_weights_do_not_change_before_their_copies_are_settled(tmp_path):
    """Only a GPU copies aside, but who asks it to wait is the same everywhere."""
    ((order, unsteady),) = on_ranks(1, noted, tmp_path)
    step = ["settle", "update"]
    assert order == [*step, *step, "copy", *step, "copy"]
    assert unsteady == [{"rng.cpu.0"}] * 2


def stopped(directory: Path, *overrides: str) -> list[bool | None]:
    """In a rank: whether a run says that it has saved the step after which it is asked to stop."""
    told = []
    with mock.patch.object(train.StopSignal, "received", return_value="SIGUSR2"):
        for writes in (True, False):
            failing = mock.patch.object(Saver, "_write", side_effect=OSError("No space left on device"))
            with nullcontext() if writes else failing:
                outcome = train.Train()(job(directory / str(writes), composed(*SAVING, *overrides)))
            assert outcome.stopped == "SIGUSR2 after step 1 of 3"
            told.append(outcome.saved)
    return told


@pytest.mark.ranks
def test_a_run_that_is_asked_to_stop_has_saved_what_is_on_disk(tmp_path):
    for name in ("True", "False"):
        (tmp_path / name).mkdir()
    assert on_ranks(1, stopped, tmp_path) == [[True, False]]
