"""Checkpoints of a run: what its steps wait for."""

from __future__ import annotations

import io
from collections.abc import Container, Mapping
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ptdbench.checkpoints.saver import Saver, Staging
from ptdbench.problems import ConfigError
from ptdbench.training.checkpointing import Checkpointing
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


def drawn(directory: Path) -> list[tuple[float, float]]:
    """In a rank: the next numbers of runs that go on after a step under several layouts, and what saved would draw."""
    gpt = ("model=gpt_tiny", "model.layers=1", "device=cpu", "train.global_batch=4", "profile.steps=0")
    save = mock.patch.object(Checkpointing, "finish", lambda self: (torch.rand(dist.get_rank() + 1), finish(self)))
    finish, found = Checkpointing.finish, []
    with save:  # each rank is somewhere in its stream
        train.Train()(job(directory, composed(*gpt, "parallel=ddp", "train.steps=1", "checkpoint.every_steps=9")))
    expected = torch.get_rng_state()
    for layout in ("ddp", "tp"):
        options = composed(*gpt, f"parallel={layout}", "train.steps=1", f"resume={directory}")
        train.Train()(job(directory / layout, options))
        drawn = torch.rand(1).item()
        torch.set_rng_state(expected)
        found.append((drawn, torch.rand(1).item()))
    return found


@pytest.mark.ranks
def test_random_generators_go_on_in_the_layout_that_they_were_saved_in(tmp_path):
    """In another, ranks may share each product, and have to draw alike."""
    (ddp, tp), (other_ddp, other_tp) = on_ranks(2, drawn, tmp_path / "run")
    assert ddp[0] == ddp[1] != other_ddp[1] == other_ddp[0]
    assert tp[0] == other_tp[0]


def refused(directory: Path) -> tuple[str, str]:
    """In a rank: what a run says that is to begin with the only checkpoint of another, which is broken."""
    train.Train()(job(directory, composed(*SAVING, "train.steps=2")))
    (tensors,) = directory.glob("checkpoints/*/__0_0.distcp")
    tensors.write_bytes(bytes(tensors.stat().st_size))
    with pytest.raises(ConfigError) as caught, redirect_stderr(io.StringIO()) as told:
        train.Train()(job(directory / "next", composed(*SAVING, f"resume={directory}")))
    return str(caught.value), told.getvalue()


@pytest.mark.ranks
def test_a_run_does_not_begin_anew_where_it_was_to_begin_with_a_checkpoint(tmp_path):
    ((error, warning),) = on_ranks(1, refused, tmp_path / "run")
    assert error == f"resume={tmp_path}/run: holds no complete checkpoint; omit it to start anew"
    broken = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert warning == f"warning: {broken} is skipped: __0_0.distcp does not match its checksum\n"
