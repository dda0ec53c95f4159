"""What the table of a sweep says of a run in each of its states."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from ptdbench.launch.slurm import SlurmError
from ptdbench.sweep import status, view
from tests.report.made import failed, keep, run
from tests.sweep.made import DONE, failure

PROGRESS = {"step": 3, "steps": 60, "unit": "tokens", "per_second": 41234.5}


def cells(sweep):
    """The row of each run, by heading."""
    return [dict(zip(view.HEADINGS, row, strict=True)) for row in view.rows(status.look(sweep.path))]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("PENDING", "PENDING"), ("PENDING (Priority)", "PENDING (Priority)"), ("PENDING (None)", "PENDING"),
        ("SUSPENDED (Reservation)", "SUSPENDED (Reservation)"), ("RUNNING n[1-2]", "RUNNING n[1-2]"),
        ("COMPLETING n1", "COMPLETING n1"), ("TIMEOUT n1", "timeout (TIMEOUT)"), ("CANCELLED", "failed (CANCELLED)"),
    ],
)  # fmt: skip
def test_the_queues_word_for_what_goes_on_and_slurms_beside_the_records_for_what_slurm_ended(sweep, words, expected):
    sweep.submit(1)
    sweep.says(_0=words)
    assert [row["state"] for row in cells(sweep)] == [expected]


def test_the_blocks_of_both_sides_of_a_comparison_stand_below_each_other(tmp_path):
    """Where what failed is told by its place, as names are the same in all blocks."""
    folder = tmp_path / "compare"
    for block in (0, 10, 2):
        for side in ("before", "after"):
            status_of = "failed" if (side, block) == ("after", 2) else "ok"
            config = {"repeat": {"series": "compare", "block": block}}
            keep(folder / side / str(block), "0_toy_ddp", run(model="toy", status=status_of, config=config))
    (folder / "before" / "11").mkdir()  # which has just begun
    seen = status.look(folder)
    assert [row[2] for row in view.rows(seen)] == [
        f"toy ddp [{side}/{block}]" for block in (0, 2, 10) for side in ("before", "after")
    ]
    assert seen.is_over
    with pytest.raises(FileNotFoundError):
        status.look(folder / "before" / "11")


def test_why_a_run_of_a_comparison_failed_is_told_with_its_side_and_block(tmp_path):
    config = {"repeat": {"series": "compare", "block": 2}}
    keep(tmp_path / "after" / "2", "0_toy_ddp", failed("ddp", "broken") | {"config": config})
    assert view.text(status.look(tmp_path)).splitlines()[-1].startswith("after/2/0_toy_ddp: failed on rank 1: ")


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
    startup = "7.8 = 4.2 + 0.0 + 0.5 + 1.0 + 2.0"
    expected = ("0", "7_0", "toy ddp", "2 nodes x 2 ranks", "ok", "3", "41,234", startup)
    assert list(view.rows(status.look(sweep.path))) == [expected]


def test_a_failure_and_one_outside_of_the_ranks_which_names_no_rank(sweep):
    sweep.begin(0)
    sweep.end(0, **failure(rank=3))
    (row,) = cells(sweep)
    assert (row["state"], row["step"], row["tokens/s"], row["startup s"]) == ("failed", "-", "-", "-")
    assert list(view.reasons(status.look(sweep.path))) == ["0_toy_ddp: failed on rank 3: RuntimeError: on purpose"]
    sweep.end(0, **failure(rank=-1, kind="LaunchError", message="rank 0 did not start\n" * 100))
    (line,) = view.reasons(status.look(sweep.path))
    assert line.startswith("0_toy_ddp: failed: LaunchError: rank 0 did not start rank 0 did not start")
    assert line.endswith(" ...")
    assert 1000 < len(line) < 1100


def test_a_refusal_is_never_cut_as_its_remedy_is_at_its_end(sweep):
    sweep.begin(0)
    refusal = "model.width=3: must be even\n" * 100
    sweep.end(0, **failure(rank=-1, kind="ConfigError", message=refusal))
    (line,) = view.reasons(status.look(sweep.path))
    assert line == f"0_toy_ddp: failed: ConfigError: {' '.join(refusal.split())}"


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


def test_samples_where_there_are_no_tokens_and_the_workload_where_there_is_no_model(sweep):
    sweep.begin(0)
    sweep.end(0, metrics={**DONE["metrics"], "tokens_per_second": None})
    assert [row["tokens/s"] for row in cells(sweep)] == ["322.1 samples"]
    sweep.end(0, workload="hello", model=None, parallel=None, steps=None, metrics=None)
    assert [row["run"] for row in cells(sweep)] == ["hello"]


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


class TestWidths:
    """The lines as they come to a terminal of so many columns."""

    @pytest.fixture
    def wide(self, sweep):
        """A sweep of which every column is full."""
        sweep.submit(4)
        sweep.says(
            _0="RUNNING n[1-16,21-36,41-56,61-76]", _1="PENDING (QOSMaxJobsPerUserLimit)", _2="TIMEOUT n1",
            _3="RUNNING n1",
        )  # fmt: skip
        sweep.tell(0, PROGRESS | {"unit": "samples"})
        sweep.end(3)
        return sweep

    @pytest.mark.parametrize("width", [200, 120, 80, 60, 40, 20, 5])
    def test_a_run_is_one_line_that_fits(self, wide, width):
        drawn = view.lines(status.look(wide.path), width)
        assert len(drawn) == 2 + 4
        assert max(map(cell_len, drawn)) <= width
        assert [line.split()[0] for line in drawn[2:]] == ["0", "1", "2", "3"]

    def test_what_matters_least_goes_first_and_the_state_stays(self, wide):
        sweep = status.look(wide.path)
        headings = {width: view.lines(sweep, width)[0].split() for width in (200, 100, 80, 60, 40, 25)}
        assert headings == {
            200: " ".join(view.HEADINGS).split(),
            100: ["#", "job", "run", "shape", "state", "step", "tokens/s"],
            80: ["#", "job", "run", "shape", "state", "step", "tokens/s"],
            60: ["#", "job", "run", "state", "step", "tokens/s"],
            40: ["#", "job", "run", "state", "step"],
            25: ["#", "run", "state"],
        }
        assert "  RUNNING n[1-16,21-36…  " in view.lines(sweep, 60)[2]

    def test_what_was_left_out_is_said_and_the_path_of_a_log_is_whole(self, wide):
        text = view.text(status.look(wide.path), 40)
        assert "\nleft out in 40 columns: shape, tokens/s,\n  startup s\n" in text
        assert f"{wide.path}/logs/7_2" in text
        assert all(len(line) <= 40 or str(wide.path) in line for line in text.splitlines())

    def test_wide_characters_count_twice(self, sweep):
        sweep.begin(0)
        sweep.end(0, model="模型模型模型模型模型模型")
        assert cell_len(view.lines(status.look(sweep.path), 40)[2]) <= 40

    def test_what_would_steer_a_terminal_or_break_a_row_does_not(self, sweep):
        sweep.begin(0)
        sweep.end(0, model="\x1b[31mred\nline")
        assert view.lines(status.look(sweep.path))[2].split()[2:5] == ["\\x1b[31mred", "line", "ddp"]


def test_the_path_of_a_log_never_falls_to_the_length_of_a_message(sweep):
    (job,) = sweep.submit(1)
    sweep.end(0, **failure(message="word " * 5000 + f"; its output is in {job.log}"))
    (line,) = view.reasons(status.look(sweep.path))
    assert len(line) < 1200 + len(job.log)
    assert line.endswith(f"; its output is in {job.log}")
