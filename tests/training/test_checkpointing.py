"""Checkpoints of a run: what its steps wait for."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ptdbench.checkpoints.saver import Saver, Staging
from ptdbench.job import Outcome
from ptdbench.launch.rendezvous import patience_for
from ptdbench.training.checkpointing import Checkpointing
from ptdbench.workloads import train
from tests.conftest import composed
from tests.daily import cases
from tests.parallel.ranks import on_ranks
from tests.refusals import refusal_of
from tests.workloads import made_task
from tests.workloads.made_job import job
from tests.workloads.made_task import TASK

SAVING = (
    "model=toy", "device=cpu", "parallel=single", "cluster.ranks_per_node=1", "train.global_batch=4", "train.steps=3",
    "checkpoint.every_steps=2", "profile.steps=0",
)  # fmt: skip


def carried_out(directory: Path, *overrides: str) -> Outcome:
    return train.Train()(job(directory, composed(*SAVING, *overrides)))


def test_weights_do_not_change_before_their_copies_are_settled(alone, tmp_path, monkeypatch):
    """Only a GPU copies aside, but who asks it to wait is the same everywhere."""
    order: list[str] = []
    unsteady: list[set[str]] = []
    copied = Staging.__call__

    def copy(self: Staging, tensors: Mapping[str, Tensor], steady: Container[str] = ()) -> Any:
        order.append("copy")
        unsteady.append({name for name in tensors if name not in steady})
        return copied(self, tensors, steady)

    monkeypatch.setattr(Staging, "__call__", copy)
    monkeypatch.setattr(Staging, "settle", lambda self: order.append("settle"))
    hook = register_optimizer_step_pre_hook(lambda *_: order.append("update"))
    assert carried_out(tmp_path).error is None
    hook.remove()
    step = ["settle", "update"]
    assert order == [*step, *step, "copy", *step, "copy"]
    assert unsteady == [{"rng.cpu.0"}] * 2


def test_a_stopped_run_whose_save_failed_does_not_count_as_saved(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(train.StopSignal, "received", lambda *_: "SIGUSR2")
    monkeypatch.setattr(Saver, "_write", mock.Mock(side_effect=OSError("No space left on device")))
    outcome = carried_out(tmp_path)
    assert (outcome.stopped, outcome.saved) == ("SIGUSR2 after step 1 of 3", False)


def drawn(directory: Path) -> list[tuple[float, float]]:
    """In a rank: the next numbers of runs that go on after a step under several layouts, and what saved would draw."""
    gpt = (
        "model=gpt_tiny",
        "model.layers=1",
        "model.width=32",
        "device=cpu",
        "train.global_batch=4",
        "profile.steps=0",
    )
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


@pytest.mark.ranks
@cases("strategy", ["ddp", "fsdp", "pdp cluster.ranks_per_node=4 +model.replaces=false"], daily=["ddp"])
def test_a_rank_goes_on_with_buffers_of_its_own(shared_run, strategy):
    """In another layout with the first replica's, of which the run tells."""
    scaled = (*TASK, f"model._target_={made_task.__name__}.Scaled", "checkpoint.every_steps=2")
    layout = (*scaled, *f"parallel={strategy}".split())
    begun, whole = (shared_run(*layout, f"train.steps={steps}") for steps in (2, 4))
    resumed = shared_run(*layout, "train.steps=4", f"resume={begun['directory']}")
    assert resumed["losses"] == whole["losses"]
    other = shared_run(*scaled, "parallel=single", "train.steps=4", f"resume={begun['directory']}")
    assert other["status"] == "ok", other["error"]
    note = "; replica 0's buffers for all, as some differed between ranks, such as blocks.0.norm.kept"
    assert other["remarks"]["resumed"].endswith(note)


def test_a_run_does_not_begin_anew_where_it_was_to_begin_with_a_checkpoint(alone, tmp_path, capsys):
    """It is the only one, and broken."""
    carried_out(tmp_path, "train.steps=2")
    (tensors,) = tmp_path.glob("checkpoints/*/__0_0.distcp")
    tensors.write_bytes(bytes(tensors.stat().st_size))
    told = f"resume={tmp_path}: has no complete checkpoint; omit it to start over"
    assert refusal_of(carried_out, tmp_path / "next", f"resume={tmp_path}") == told
    skipped = f"warning: skipping {tensors.parent}: {tensors.name} does not match its checksum\n"
    assert capsys.readouterr().err == skipped


def test_groups_that_save_and_resume_are_as_patient_as_all_others(alone, tmp_path, monkeypatch):
    """torch gives a group half an hour, whatever the default group has."""
    seen, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda **how: (seen.append(how.get("timeout")), new_group(**how))[1])
    carried_out(tmp_path, "train.steps=2", "timeout_minutes=20")
    carried_out(tmp_path / "next", "checkpoint.every_steps=null", f"resume={tmp_path}", "timeout_minutes=20")
    assert seen == [patience_for(20)] * 2
