"""The progress line, and how a pipeline's loss comes to the rank that draws it."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch.world import World
from ptdbench.training import progress_reporter as module
from ptdbench.training.progress_reporter import ProgressReporter
from tests.conftest import ROOT


class Loop:
    """What the reporter reads of a step loop: ``finished`` of the steps are over."""

    def __init__(self, losses: list[float], finished: int | None = None) -> None:
        self.losses = [torch.tensor(loss) for loss in losses]
        self.done = len(losses)
        count = len(losses) if finished is None else finished
        self.clock = SimpleNamespace(over=lambda step: step < count)


def reporter(store: dist.Store, rank: int, pipeline: int, steps: int = 3) -> ProgressReporter:
    layout = SimpleNamespace(global_batch=4)
    training = SimpleNamespace(data=SimpleNamespace(tokens_per_sample=None), layout=layout)
    spec, world = SimpleNamespace(label="toy pdp"), World(rank, 2, rank, 2, "local")
    job: Any = SimpleNamespace(spec=spec, training=training, world=world, store=store, directory=None)
    return ProgressReporter(job, steps, owns_loss=rank == pipeline - 1)


@pytest.fixture
def wall(monkeypatch) -> SimpleNamespace:
    """A clock on the wall that the test moves."""
    time = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: time.now)
    return time


def last_loss(text: str) -> str | None:
    found = re.findall(r"loss (\S+)", text.splitlines()[-1])
    return found[0] if found else None


def test_one_stage_draws_what_it_knows_itself(capsys, wall):
    alone = reporter(dist.HashStore(), rank=0, pipeline=1)
    alone.report(Loop([3.0]), 3)
    assert capsys.readouterr().err == ""  # it is not time yet
    wall.now = 60.0
    alone.report(Loop([3.0, 2.5]), 3)
    line = capsys.readouterr().err
    assert "toy pdp  step 2/3" in line
    assert last_loss(line) == "2.5000"


def test_a_run_that_was_cut_short_ends_its_line_at_the_new_last_step(capsys, wall):
    alone = reporter(dist.HashStore(), rank=0, pipeline=1, steps=100)
    alone.report(Loop([3.0, 2.5]), 2)
    line = capsys.readouterr().err
    assert "step 2/2" in line
    assert "0:00 left" in line


def test_a_loss_that_the_device_has_not_finished_is_not_waited_for(capsys, wall):
    alone = reporter(dist.HashStore(), rank=0, pipeline=1)
    wall.now = 60.0
    alone.report(Loop([3.0, 2.5], finished=0), 3)
    assert last_loss(capsys.readouterr().err) is None
    wall.now = 120.0
    alone.report(Loop([3.0, 2.5], finished=1), 3)
    assert last_loss(capsys.readouterr().err) == "3.0000"


def test_the_last_loss_stays_when_the_steps_are_drained(capsys, wall):
    alone = reporter(dist.HashStore(), rank=0, pipeline=1)
    wall.now = 60.0
    alone.report(Loop([3.0, 2.5]), 4)
    capsys.readouterr()
    wall.now = 120.0
    alone.report(Loop([]), 4)
    assert last_loss(capsys.readouterr().err) == "2.5000"


def test_the_loss_of_the_last_stage_reaches_the_line(capsys, wall):
    store = dist.HashStore()
    first, last = reporter(store, rank=0, pipeline=2), reporter(store, rank=1, pipeline=2)
    wall.now = 60.0
    first.report(Loop([0.0]), 3)
    assert last_loss(capsys.readouterr().err) is None  # nobody has told yet, and nobody is waited for
    last.report(Loop([3.0]), 3)
    wall.now = 120.0
    first.report(Loop([0.0, 0.0]), 3)
    assert last_loss(capsys.readouterr().err) == "3.0000"


def test_the_line_ends_with_the_last_loss_however_short_the_run(capsys, wall):
    store = dist.HashStore()
    first, last = reporter(store, rank=0, pipeline=2), reporter(store, rank=1, pipeline=2)
    last.report(Loop([3.0]), 3)
    last.report(Loop([3.0, 2.5, 2.0]), 3)
    first.report(Loop([0.0, 0.0, 0.0]), 3)
    line = capsys.readouterr().err
    assert "step 3/3" in line
    assert last_loss(line) == "2.0000"


def test_a_last_stage_that_never_tells_does_not_hold_the_others_up_for_long(capsys, wall, monkeypatch):
    monkeypatch.setattr(module, "_LAST_WAIT", module.timedelta(milliseconds=10))
    reporter(dist.HashStore(), rank=0, pipeline=2, steps=1).report(Loop([0.0]), 1)
    assert last_loss(capsys.readouterr().err) is None


def test_it_does_not_tell_at_every_step(wall):
    told = []

    class Watched:
        def set(self, key: str, value: str) -> None:
            told.append(value)

    last: ProgressReporter = reporter(Watched(), rank=1, pipeline=2, steps=100)  # type: ignore[arg-type]
    for step in range(1, 11):
        last.report(Loop([float(step)] * step), 100)
        wall.now += 0.125
    assert told == ["1.0", "5.0", "9.0"]


@pytest.mark.parametrize("rank", [2, 3])
def test_other_replicas_are_silent(rank, capsys, wall):
    silent: ProgressReporter = reporter(None, rank=rank, pipeline=2)  # type: ignore[arg-type]
    wall.now = 60.0
    silent.report(Loop([1.0, 1.0, 1.0]), 3)
    silent.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.ranks
def test_a_real_pipeline(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "model=toy", "parallel=pdp", "train.steps=5", "device=cpu"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = [line for line in done.stderr.splitlines() if "step" in line][-1]
    assert re.fullmatch(r"toy pdp  step 5/5  [\d,]+ samples/s  loss \d\.\d{4}  0:00 left", line)
