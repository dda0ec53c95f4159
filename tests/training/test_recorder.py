"""The series of a run: drained as it goes on, taken over from checkpoints, kept from a full disk."""

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ptdbench.measure import timing
from ptdbench.records import series, store
from ptdbench.training import recorder
from ptdbench.training.loop import StepLoop
from ptdbench.workloads import train
from tests.conftest import composed, run_on_shared_ranks
from tests.daily import cases
from tests.parallel.ranks import on_ranks
from tests.workloads.made_job import job

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
TOY = ("model=toy", "device=cpu", "parallel=ddp", "train.global_batch=4", "profile.steps=0")


def drained(directory: Path) -> tuple[list[int], int, list[float], list[list[float]]]:
    """In a rank: the steps of each block, the most that it held, and losses and times of a run that drains every 3.

    Rank r takes r + 1 seconds for each step, by a clock that is made up.
    """
    held, mine = 0, dist.get_rank() + 1.0

    def step(self: StepLoop) -> None:
        nonlocal held
        take(self)
        noted = (self.losses, self.memory_bytes, self.feed.wait_seconds, self.update.learning_rates)
        held = max(held, len(self.clock.seconds()), *map(len, noted))

    take = StepLoop.step
    seldom = mock.patch.multiple(recorder, DRAIN_EVERY=3, DRAIN_SECONDS=math.inf)
    timed = mock.patch.object(type(timing.clock_for(CPU)), "seconds", lambda self: [mine] * self.finished())
    with seldom, timed, mock.patch.object(StepLoop, "step", step):
        blocks = blocks_of(directory, TOY)
    losses, seconds = (series.column(blocks, name).tolist() for name in ("loss", "step_seconds"))
    return [len(rows) for rows in blocks], held, losses, seconds


def blocks_of(directory: Path, options: tuple[str, ...]) -> list[np.ndarray]:
    outcome = train.Train()(job(directory, composed(*options, "train.steps=10")))
    assert outcome.error is None
    return list(series.blocks(directory / series.NAME))


def at_once_and_drained(folder: Path) -> tuple[Any, ...]:
    """In a rank: the losses of a run that brings its steps together once, at its end, and one that drains them."""
    with mock.patch.object(recorder.Recorder, "due", False):
        (rows,) = blocks_of(folder / "at once", TOY)
    return rows["loss"].tolist(), *drained(folder / "drained")


def test_ranks_hold_no_more_steps_than_since_the_last_drain_and_each_has_its_own_times(tmp_path):
    for at_once, blocks, held, losses, seconds in on_ranks(2, at_once_and_drained, tmp_path):
        assert (blocks, held) == ([1, 3, 3, 3], 3)
        assert losses == at_once
        assert seconds == [[1.0, 2.0]] * 10


@pytest.mark.parametrize(("times", "steps"), [(2, 10), (99, 0)])
def test_series_are_written_after_a_full_disk(alone, tmp_path, monkeypatch, times, steps):
    append, tried = series.append, itertools.count()

    def full(path: Path, rows: np.ndarray) -> None:
        if next(tried) < times:
            raise OSError(28, "No space left on device")
        append(path, rows)

    monkeypatch.setattr(recorder, "DRAIN_EVERY", 3)
    monkeypatch.setattr(series, "append", full)
    with nullcontext() if steps else pytest.raises(OSError, match="No space left on device"):
        blocks_of(tmp_path, (*TOY, "parallel=single", "cluster.ranks_per_node=1"))
    assert len(series.column(series.blocks(tmp_path / series.NAME), "loss")) == steps


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), store.Damaged("record.json is damaged")])
def test_steps_and_evaluations_are_shown_as_soon_as_the_record_can_be_read(tmp_path, fault):
    job: Any = SimpleNamespace(directory=tmp_path, world=SimpleNamespace(is_first=False))
    loop: Any = SimpleNamespace(done=3)
    records = recorder.Recorder(job, loop)
    records.logs = [log := mock.Mock()]
    records._unshown = [series.unknown(3)]
    with mock.patch.object(store, "read_record", side_effect=[fault, {}]):
        records._show([{"step": 3}])
        loop.done, records._unshown = 5, [*records._unshown, series.unknown(2)]
        records._show([{"step": 3}, {"step": 5}])
    ((_, first, rows, news),) = (call.args for call in log.show.call_args_list)
    assert (first, len(rows), records._unshown) == (0, 5, [])
    assert news == [{"step": 3}, {"step": 5}]


@cases("left", [None, 2], daily=[2])
def test_steps_whose_series_are_gone_have_no_numbers_and_a_remark(shared_run, left):
    begun = Path(shared_run(*TOY, "train.steps=4", "checkpoint.every_steps=4")["directory"])
    if left is None:
        (begun / series.NAME).unlink()
    else:
        assert series.keep(begun / series.NAME, left) == left
    record = shared_run(*TOY, "train.steps=6", f"resume={begun}")
    assert record["error"] is None  # which is no divergence
    assert [loss is None for loss in record["losses"]] == [step in range(left or 0, 4) for step in range(6)]
    (remark,) = record["remarks"]["checkpoints"]
    assert remark == f"{begun}/series.npy has {left or 0} of the 4 earlier steps; the figures of the rest are lost"
    assert record["metrics"]["samples_per_second"] > 0


def test_a_run_that_goes_on_where_it_was_replaces_what_followed_its_checkpoint(tmp_path):
    saving = (*TOY, "checkpoint.every_steps=4", "checkpoint.keep=2")
    whole = run_on_shared_ranks(tmp_path, *saving, "train.steps=6")["losses"]
    tensors = tmp_path / "checkpoints" / "step-00000006" / "__0_0.distcp"
    tensors.write_bytes(bytes(tensors.stat().st_size))
    record = run_on_shared_ranks(tmp_path, *saving, "train.steps=7")
    kept = sorted(path.name[-1] for path in tensors.parents[1].iterdir())
    assert kept == ["4", "6", "7"]  # the broken one pushes none out
    assert record["error"] is None
    assert record["remarks"]["resumed"].startswith("after step 4, from ")
    assert "step-00000006: __0_0.distcp does not match" in record["remarks"]["checkpoints"][0]
    assert (record["losses"][:6], len(record["losses"])) == (whole, 7)
    assert [(one["first_step"], one["steps"]) for one in record["segments"]] == [(0, 4), (4, 3)]
    assert record["segments"][0]["layout"] == record["segments"][1]["layout"]
    *_, before, last = run_on_shared_ranks(tmp_path, *saving, "train.steps=9", "train.clip_norm=1e3")["segments"]
    assert before["layout"] != last["layout"]
