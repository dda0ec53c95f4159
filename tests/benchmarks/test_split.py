"""Few long runs or many short ones: what is made of the step times of runs."""

from datetime import datetime, timedelta

import numpy as np
import pytest

from benchmarks import split


class Made(dict):
    """A run with step times, as :func:`ptdbench.load` gives them."""

    seconds: np.ndarray

    def series(self, name):
        assert name == "step_seconds"
        return self.seconds


@pytest.fixture
def runs():
    """Of two layouts in ten blocks: 2 s besides 60 steps of 0.1 s; runs differ by 5 %, the steps of one hardly."""
    random, began, made = np.random.default_rng(0), datetime(2026, 1, 1), []
    for number in range(20):
        run = Made(parallel=("ddp", "fsdp")[number % 2], started=began.isoformat())
        run["config"] = {"repeat": {"block": number // 2}, "train": {"warmup_steps": 3}}
        run.seconds = 0.1 * np.exp(random.normal(0, 0.05)) * np.exp(random.normal(0, 0.001, 60))
        began += timedelta(seconds=2 + float(run.seconds.sum()))
        made.append(run)
    return made


def test_what_a_run_takes_besides_its_steps(runs):
    assert split.besides_steps(runs[::-1]) == pytest.approx(2)


def test_where_runs_differ_and_steps_do_not_the_shortest_runs_tell_most(runs):
    found = [line.split() for line in split.rows(runs)]
    assert [int(steps) for steps, *_ in found] == list(split.STEPS)
    assert {deviation for _, deviation, *_ in found} <= {found[0][1]} | {found[-1][1]}
    assert [float(one[2]) for one in found] == pytest.approx([2 + 0.1 * steps for steps in split.STEPS], rel=0.03)
    widths = [float(one[-1].rstrip("%")) for one in found]
    assert widths == sorted(widths)
