"""What is reported of the steps, and how a pipeline's loss comes to the rank that shows it."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch.world import World
from ptdbench.report.display import Display, Heading
from ptdbench.training import progress_reporter as module
from ptdbench.training.progress_reporter import ProgressReporter
from tests import forked


class Rank:
    """A rank of pdp, with what the reporter reads of its step loop: ``finished`` of the steps are over."""

    def __init__(self, wall: SimpleNamespace, store: Any, rank: int = 0, pipeline: int = 1, steps: int = 3) -> None:
        self.losses: list[torch.Tensor] = []
        self.done, self.finished = 0, 0
        self.followed: list[int] = []
        self.clock = SimpleNamespace(over=lambda step: step < self.finished, follow=self.followed.append)
        self.engine = SimpleNamespace(owns_loss=rank % pipeline == pipeline - 1)
        self.replica = rank // pipeline
        self.err = io.StringIO()
        heading = Heading("toy pdp") if rank == 0 else None
        display = Display(heading, stream=self.err, clock=lambda: wall.now)
        training = SimpleNamespace(data=SimpleNamespace(tokens_per_sample=None), layout=SimpleNamespace(global_batch=4))
        spec = SimpleNamespace(config=SimpleNamespace(general=SimpleNamespace(compile=False)), virtual=None)
        world = World(rank, 2, rank, 2, "local")
        job: Any = SimpleNamespace(
            spec=spec, training=training, world=world, store=store, directory=None, display=display
        )
        self._reporter = ProgressReporter(job, self, steps)  # type: ignore[arg-type]

    def report(self, losses: list[float], steps: int = 3, finished: int | None = None, drained: int = 0) -> str:
        """What is shown after these steps."""
        self.losses = [torch.tensor(loss) for loss in losses]
        self.done, self.finished = drained + len(losses), len(losses) if finished is None else finished
        self._reporter.report(steps)
        shown = self.err.getvalue()
        self.err.truncate(self.err.seek(0))
        return shown


@pytest.fixture
def wall(monkeypatch) -> SimpleNamespace:
    """A clock on the wall that the test moves."""
    time = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: time.now)
    return time


def last_loss(text: str) -> str | None:
    found = re.findall(r"loss (\S+)", text.splitlines()[-1])
    return found[0] if found else None


def test_one_stage_shows_what_it_knows_itself_and_ends_where_it_is_cut_short(wall):
    alone = Rank(wall, dist.HashStore(), steps=100)
    assert alone.report([3.0], 100) == ""  # it is not time yet
    wall.now = 60.0
    line = alone.report([3.0, 2.5], 100)
    assert "toy pdp  step 2/100  0.0667 samples/s" in line
    assert last_loss(line) == "2.5000"
    wall.now = 60.1
    line = alone.report([3.0, 2.5, 2.0], 3)
    assert "step 3/3" in line
    assert "0:00 left" in line


def test_a_loss_that_is_not_finished_is_not_waited_for_and_the_last_stays_when_steps_are_drained(wall):
    alone = Rank(wall, dist.HashStore(), steps=4)
    alone.report([3.0], 4)
    for minute, (finished, expected) in enumerate(((0, None), (1, "3.0000"), (2, "2.5000")), start=1):
        wall.now = 60.0 * minute
        assert last_loss(alone.report([3.0, 2.5], 4, finished=finished)) == expected
    wall.now = 240.0
    assert last_loss(alone.report([], 4, drained=2)) == "2.5000"
    assert alone.followed == [0, 1], "the stream that copies a loss is ordered after its step, for sanitizers too"


def test_the_loss_of_the_last_stage_is_shown(wall):
    store = dist.HashStore()
    first, last = Rank(wall, store, rank=0, pipeline=2), Rank(wall, store, rank=1, pipeline=2)
    first.report([0.0], 9)
    wall.now = 60.0
    assert last_loss(first.report([0.0, 0.0], 9)) is None  # nobody has told yet, and nobody is waited for
    assert last.report([3.0], 9) == ""
    wall.now = 120.0
    assert last_loss(first.report([0.0, 0.0, 0.0], 9)) == "3.0000"


def test_the_last_loss_is_shown_however_short_the_run(wall):
    store = dist.HashStore()
    first, last = Rank(wall, store, rank=0, pipeline=2), Rank(wall, store, rank=1, pipeline=2)
    last.report([3.0])
    last.report([3.0, 2.5, 2.0])
    line = first.report([0.0, 0.0, 0.0])
    assert "step 3/3" in line
    assert last_loss(line) == "2.0000"


def test_a_last_stage_that_never_tells_does_not_hold_the_others_up_for_long(wall, monkeypatch):
    monkeypatch.setattr(module, "_LAST_WAIT", module.timedelta(milliseconds=10))
    first = Rank(wall, dist.HashStore(), rank=0, pipeline=2, steps=1)
    assert last_loss(first.report([0.0], 1)) is None


def test_it_does_not_tell_at_every_step(wall):
    told = []

    class Watched:
        def set(self, key: str, value: str) -> None:
            told.append(value)

    last = Rank(wall, Watched(), rank=1, pipeline=2, steps=100)
    for step in range(1, 11):
        last.report([float(step)] * step, 100)
        wall.now += 0.125
    assert told == ["1.0", "5.0", "9.0"]


@pytest.mark.parametrize("rank", [2, 3])
def test_other_replicas_are_silent(rank, wall):
    silent = Rank(wall, None, rank=rank, pipeline=2)
    wall.now = 60.0
    assert silent.report([1.0, 1.0, 1.0]) == ""


RUN = ("model=toy", "parallel=pdp", "train.steps=5", "device=cpu")


@pytest.mark.ranks
def test_a_real_pipeline(tmp_path):
    done = forked.with_ranks(*RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = [line for line in done.stderr.splitlines() if "  step " in line][-1]
    assert re.fullmatch(r"toy pdp  step 5/5  [\d,.]+ samples/s  loss \d\.\d{4}  0:00 left", line)
