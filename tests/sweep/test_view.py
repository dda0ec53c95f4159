"""What the table of a sweep says of a run in each of its states."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from ptdbench.launch.slurm import SlurmError
from ptdbench.sweep import status, view
from tests.sweep.made import DONE, failure

PROGRESS = {"step": 3, "steps": 60, "unit": "tokens", "per_second": 41234.5}


def cells(sweep):
    """The row of each run, by heading."""
    return [dict(zip(view.HEADINGS, row, strict=True)) for row in view.rows(status.look(sweep.path))]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("PENDING", "PENDING"),
        ("PENDING (Priority)", "PENDING (Priority)"),
        ("PENDING (JobHeldUser)", "PENDING (JobHeldUser)"),
        ("PENDING (None)", "PENDING"),
        ("SUSPENDED (Reservation)", "SUSPENDED (Reservation)"),
        ("CONFIGURING n1", "CONFIGURING n1"),
        ("RUNNING n[1-2]", "RUNNING n[1-2]"),
        ("COMPLETING n1", "COMPLETING n1"),
        ("TIMEOUT n1", "timeout (TIMEOUT)"),
        ("DEADLINE", "timeout (DEADLINE)"),
        ("OUT_OF_MEMORY n1", "oom (OUT_OF_MEMORY)"),
        ("PREEMPTED n1", "preempted (PREEMPTED)"),
        ("NODE_FAIL n1", "failed (NODE_FAIL)"),
        ("CANCELLED", "failed (CANCELLED)"),
        ("COMPLETED n1", "failed (COMPLETED)"),
    ],
)
def test_the_queues_word_for_what_goes_on_and_slurms_beside_the_records_for_what_slurm_ended(sweep, words, expected):
    sweep.submit(1)
    sweep.says(_0=words)
    assert [row["state"] for row in cells(sweep)] == [expected]


def test_forgotten_and_not_answered(sweep):
    sweep.submit(1)
    sweep.queue = SlurmError("Unable to contact slurm controller")
    assert [row["state"] for row in cells(sweep)] == ["unfinished"]
    assert list(view.reasons(status.look(sweep.path))) == ["SLURM does not answer: Unable to contact slurm controller"]
    sweep.queue = {}
    assert [row["state"] for row in cells(sweep)] == ["failed"]


def test_a_run_that_ended_well(sweep):
    sweep.submit(1)
    sweep.end(0)
    assert cells(sweep) == [
        {
            "#": "0",
            "job": "7_0",
            "run": "toy ddp",
            "shape": "2 nodes x 2 ranks",
            "state": "ok",
            "step": "3",
            "tokens/s": "41,234",
            "startup s": "7.8 = 4.2 + 0.0 + 0.5 + 1.0 + 2.0",
        }
    ]


def test_a_run_that_failed_by_itself(sweep):
    sweep.submit(1)
    sweep.end(0, **failure(rank=3))
    (row,) = cells(sweep)
    assert (row["state"], row["step"], row["tokens/s"], row["startup s"]) == ("failed", "-", "-", "-")
    assert list(view.reasons(status.look(sweep.path))) == ["0_toy_ddp: failed on rank 3: RuntimeError: on purpose"]


def test_a_failure_outside_of_the_ranks_names_no_rank(sweep):
    sweep.begin(0)
    sweep.end(0, **failure(rank=-1, kind="ConfigError", message="model.width=3: must be even\n" * 100))
    (line,) = view.reasons(status.look(sweep.path))
    assert line.startswith("0_toy_ddp: failed: ConfigError: model.width=3: must be even model.width=3")
    assert len(line) < 350


@pytest.mark.parametrize(
    ("progress", "step", "rate"),
    [
        (None, "-", "-"),
        (PROGRESS, "3/60", "41,234"),
        (PROGRESS | {"unit": "samples"}, "3/60", "41,234 samples"),
        (PROGRESS | {"per_second": None}, "3/60", "-"),
    ],
)
def test_a_run_that_goes_on(sweep, progress, step, rate):
    sweep.submit(1)
    sweep.says(_0="RUNNING n1")
    if progress:
        sweep.tell(0, progress)
    (row,) = cells(sweep)
    assert (row["step"], row["tokens/s"]) == (step, rate)


def test_samples_where_there_are_no_tokens(sweep):
    sweep.begin(0)
    sweep.end(0, metrics={**DONE["metrics"], "tokens_per_second": None})
    (row,) = cells(sweep)
    assert row["tokens/s"] == "322.1 samples"


def test_runs_of_this_machine_have_no_job_and_the_shape_that_they_found(sweep):
    sweep.begin(0)
    sweep.begin(1)
    sweep.begin(2)
    sweep.end(0)
    sweep.end(1, nodes=["vm"], world_size=2)
    assert [(row["job"], row["shape"], row["state"]) for row in cells(sweep)] == [
        ("-", "2 nodes, 4 ranks", "ok"),
        ("-", "1 node, 2 ranks", "ok"),
        ("-", "-", "unfinished"),
    ]


def test_a_run_without_a_model_is_called_by_its_workload(sweep):
    sweep.begin(0)
    sweep.end(0, workload="hello", model=None, parallel=None, losses=[], metrics=None)
    (row,) = cells(sweep)
    assert row["run"] == "hello"


class TestText:
    def test_columns_stand_under_each_other_and_reasons_below(self, sweep):
        sweep.submit(12)
        sweep.end(3)
        sweep.end(7, **failure())
        sweep.says(**{f"_{number}": "PENDING (Resources)" for number in range(12)})
        lines = view.text(status.look(sweep.path)).splitlines()
        assert lines[-1] == "7_toy_ddp: failed on rank 1: RuntimeError: on purpose"
        heading, rule, *rows = lines[:-1]
        assert len(rows) == 12
        assert set(rule) == {"-"}
        assert len(rule) == max(map(len, [heading, *rows]))
        for row in rows:
            assert re.split(r"\s{2,}", row)[3] == row[heading.index("shape") :].partition("  ")[0]
            assert row[heading.index("state") :].startswith(("PENDING (Resources)", "ok", "failed"))

    def test_a_thousand_runs(self, sweep):
        sweep.submit(1000)
        for number in range(0, 1000, 2):
            sweep.end(number)
        sweep.says(**{f"_{number}": "PENDING (Priority)" for number in range(1000)})
        rows = view.text(status.look(sweep.path)).splitlines()[2:]
        assert [(row.split()[0], row.split()[1]) for row in rows] == [(str(n), f"7_{n}") for n in range(1000)]
        assert sum(" ok " in row for row in rows) == sum("PENDING (Priority)" in row for row in rows) == 500


class TestTable:
    @pytest.mark.parametrize(("limit", "numbers"), [(None, ["0", "1", "2"]), (2, ["0", "1"])])
    def test_it_shows_as_many_as_there_is_room_for(self, sweep, limit, numbers):
        sweep.submit(3)
        sweep.says(_0="RUNNING n1", _1="PENDING (Priority)", _2="PENDING (Priority)")
        drawn = view.table(status.look(sweep.path), limit)
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(drawn)
        heading, _, *rows = [line.rstrip() for line in capture.get().splitlines()]
        assert heading.split() == " ".join(view.HEADINGS).split()
        assert [row.split()[0] for row in rows] == numbers
        assert "RUNNING n1" in rows[0]
