"""Steps that are rehearsed: they compute as all later ones do, and a rehearsal leaves no other trace."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptdbench.training.loop import StepLoop, Update
from ptdbench.workloads.train import Train, assemble
from tests.conftest import composed
from tests.daily import cases, selected
from tests.parallel.ranks import each, on_ranks
from tests.training.test_evaluation import TASK
from tests.workloads.made_job import job

pytestmark = pytest.mark.ranks

DROPOUT = (*TASK, "+model.dropout=0.1", "train.global_batch=48", "profile.steps=0")
LAYOUTS = {
    "ddp": (3, "parallel=ddp"),
    "ddp without a static graph": (3, "parallel=ddp", "parallel.static_graph=false"),
    "ddp in small buckets": (3, "parallel=ddp", "parallel.bucket_mb=0.002"),
    "ddp with accumulation": (3, "parallel=ddp", "train.micro_batch=4"),
    "ddp with a norm over all ranks": (3, "parallel=ddp", "parallel.sync_batchnorm=true"),
    "fsdp": (3, "parallel=fsdp"),
    "pdp in one replica": (3, "parallel=pdp"),
    "pdp": (6, "parallel=pdp"),
    "pdp with accumulation": (6, "parallel=pdp", "parallel.microbatches=2", "train.micro_batch=4"),
}
SEEDS = range(2)


class Gradient(NamedTuple):
    """A weight's gradient, and where it lies: in which of the memories that the gradients of a step share."""

    memory: int
    offset: int
    numbers: Tensor


def gradients_of(directory: Path, composed: DictConfig, **options: Any) -> list[dict[str, Gradient]]:
    for name, value in options.items():
        OmegaConf.update(composed, name, value)
    seen: list[dict[str, Gradient]] = []
    update = Update.__call__

    def watched(self: Update, step: int) -> None:
        memories: dict[int, int] = {}
        seen.append({})
        for name, weight in self._engine.module.named_parameters():
            numbers = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            memory = memories.setdefault(numbers.untyped_storage().data_ptr(), len(memories))
            seen[-1][name] = Gradient(memory, numbers.storage_offset(), numbers.clone())
        update(self, step)

    with mock.patch.object(Update, "__call__", watched):
        Train()(job(directory, composed))
    return seen


def whole_and_resumed(directory: Path, composed: DictConfig) -> list[tuple[list[Any], list[Any]]]:
    """For each seed, the steps of a run that was not interrupted, and those of one that goes on after step 2."""
    found = []
    for seed in SEEDS:
        whole, half = directory / f"whole {seed}", directory / f"half {seed}"
        steps = gradients_of(whole, composed, seed=seed, resume=None)
        if dist.get_rank() == 0:
            shutil.copytree(whole / "checkpoints" / "step-00000002", half / "checkpoints" / "step-00000002")
        dist.barrier()
        found.append((steps, gradients_of(directory / f"rest {seed}", composed, resume=str(half))))
    return found


def traces(loop: StepLoop) -> dict[str, Any]:
    """Whatever the next steps depend on, and what they leave in a record."""
    update = loop.update
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in loop.engine.module.parameters()]
    state = update.optimizer.state_dict()
    return {
        "weights": [weight.detach().clone() for weight in local],
        "gradients": [weight.grad for weight in local],
        "buffers": [buffer.clone() for buffer in loop.engine.module.buffers()],
        "chance": torch.get_rng_state(),
        "optimizer": (len(state["state"]), [{**group, "rule": 0} for group in state["param_groups"]]),  # no words
        "scaler": update.scaler.state_dict(),
        "recorded": [loop.done, *loop.losses, *update.learning_rates, *update.gradient_norms, *loop.feed.wait_seconds],
        "training": loop.engine.module.training,
    }


def before_and_after(directory: Path, composed: DictConfig) -> tuple[dict[str, Any], dict[str, Any], int]:
    loop = assemble(job(directory, composed))
    passes: list[bool] = []
    gradients = loop.engine.gradients
    loop.engine.gradients = lambda *given: passes.append(loop.engine.module.training) or gradients(*given)
    torch.rand(3)  # ranks are somewhere in their stream
    before = traces(loop)
    loop.rehearse()
    assert all(passes)
    return before, traces(loop), len(passes)


def rehearsed(directory: Path, composed: DictConfig) -> list[int]:
    """How often a run rehearses that saves nothing, one that saves, and one that goes on from there without saving."""
    found = []
    for every, steps, resume in ((None, 2, None), (2, 2, None), (None, 3, str(directory))):
        for name, value in {"checkpoint.every_steps": every, "train.steps": steps, "resume": resume}.items():
            OmegaConf.update(composed, name, value)
        with mock.patch.object(StepLoop, "rehearse") as rehearse:
            Train()(job(directory if every else directory / f"to step {steps}", composed))
        found.append(rehearse.call_count)
    return found


@pytest.fixture(scope="module")
def of_ranks(request, tmp_path_factory) -> dict[tuple[Any, ...], list[Any]]:
    """What each rank has seen of each layout, by what is done and the layout's name."""
    found = {}
    names = selected(request, "name")
    for size in {LAYOUTS[name][0] for name in names}:
        folder = tmp_path_factory.mktemp(f"of-{size}")
        looks = [
            (what, name, folder) for name in LAYOUTS if name in names and LAYOUTS[name][0] == size for what in DONE
        ]
        of_each = on_ranks(size, each, seen_of, looks)
        found |= {look[:2]: [of_rank[look] for of_rank in of_each] for look in looks}
    return found


#: How a layout is looked at, and the options for it.
DONE = {
    "steps": (whole_and_resumed, "train.steps=5", "checkpoint.every_steps=2", "checkpoint.keep=3"),
    "rehearsal": (before_and_after, "+data.workers=1"),
}


def seen_of(what: str, name: str, folder: Path) -> Any:
    body, *options = DONE[what]
    return body(folder / name / what, composed(*DROPOUT, *LAYOUTS[name][1:], *options))


@cases("name", LAYOUTS, daily=["ddp with accumulation"])
def test_every_step_sums_as_all_others_do_and_a_resumed_run_as_one_that_was_not_interrupted(of_ranks, name):
    """What is compared is equal by construction: the same operations in the same order.

    Where gradients lie in DDP's buckets tells the order of a sum over ranks whether or not it shows in these numbers.
    """
    for of_rank in of_ranks["steps", name]:
        for whole, resumed in of_rank:
            assert (len(whole), len(resumed)) == (5, 3)
            if name != "fsdp":  # there each shard is memory of its own
                places = [{name: one[:2] for name, one in step.items()} for step in (*whole, *resumed)]
                assert places == [places[-1]] * 8
            for expected, found in zip(whole[2:], resumed, strict=True):
                assert all(torch.equal(expected[name].numbers, found[name].numbers) for name in expected)


@cases("name", LAYOUTS, daily=["ddp with accumulation"])
def test_a_rehearsal_changes_nothing_else(of_ranks, name):
    static = ("ddp", "ddp in small buckets", "ddp with a norm over all ranks")
    passes = 0 if name == "fsdp" else 2 if name in (*static, "pdp with accumulation") else 1
    for before, after, seen in of_ranks["rehearsal", name]:
        assert seen == passes
        assert before["training"]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_a_run_rehearses_that_may_be_resumed_or_is(tmp_path):
    assert on_ranks(2, rehearsed, tmp_path, composed(*DROPOUT, "parallel=ddp")) == [[0, 1, 1]] * 2
