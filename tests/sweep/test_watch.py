"""The table of a sweep, and following it on the cluster: what is announced, how each change looks, how it ends."""

import re
import time
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from ptdbench.launch.local import Stopped
from ptdbench.launch.slurm import SlurmError
from ptdbench.records import store
from ptdbench.sweep import status, watch
from ptdbench.terminal import plain
from tests.refusals import Abridged
from tests.sweep.made import DONE, PROGRESS, failure


def cells(sweep):
    seen = status.settle(sweep.path)
    return [{column.heading: column.cell(row) for column in watch.COLUMNS} for row in watch.numbered(seen)]


@pytest.mark.parametrize(("words", "expected"), [
    ("PENDING", "PENDING"), ("PENDING (Priority)", "PENDING (Priority)"),
    ("SUSPENDED (Reservation)", "SUSPENDED (Reservation)"), ("RUNNING n[1-2]", "RUNNING n[1-2]"),
    ("COMPLETING n1", "COMPLETING n1"), ("TIMEOUT n1", "timeout (TIMEOUT)"), ("CANCELLED", "failed (CANCELLED)"),
])  # fmt: skip
def test_the_queues_word_for_what_goes_on_and_slurms_beside_the_records_for_what_slurm_ended(sweep, words, expected):
    sweep.submit(1)
    sweep.says(_0=words)
    assert [row["state"] for row in cells(sweep)] == [expected]


def test_runs_of_a_sweep_are_named_by_what_differs_whether_or_not_they_have_begun(sweep):
    for number, lr in enumerate((0.1, 1e30, 0.2)):
        path = sweep.begin(number)
        known = store.load_record(path)
        store.write_record(path, known | {"config": {**known["config"], "optimizer": {"name": "sgd", "lr": lr}}})
    sweep.end(0, layout={"data": 1, "pipeline": 2, "microbatches": 4, "accumulation": 1})
    sweep.begin(3)
    (sweep.path / "3_toy_ddp" / store.RECORD).write_text("{")
    names = ["toy ddp lr=0.1", "toy ddp lr=1e+30", "toy ddp lr=0.2", "-"]
    assert [row["run"] for row in cells(sweep)] == names
    assert [one["run"] for one in watch.as_json(status.settle(sweep.path))["runs"]] == names


def test_a_slurm_that_does_not_answer_and_a_run_that_ended_well(sweep):
    sweep.submit(1)
    sweep.queue = SlurmError("Unable to contact slurm controller")
    assert cells(sweep)[0]["state"] == "unfinished"
    (reason,) = watch.reasons(status.settle(sweep.path))
    assert reason == "SLURM does not answer: Unable to contact slurm controller"
    sweep.end(0)
    expected = ("0", "7_0", "toy ddp", "2 nodes x 2 ranks", "ok", "3", "41,234")
    assert [(*row.values(),) for row in cells(sweep)] == [expected]


def test_a_failure_and_one_outside_of_the_ranks_which_names_no_rank(sweep):
    sweep.begin(0)
    sweep.end(0, **failure(rank=3))
    (row,) = cells(sweep)
    assert (row["state"], row["step"], row["tokens/s"]) == ("failed", "-", "-")
    assert list(watch.reasons(status.settle(sweep.path))) == ["0_toy_ddp: failed on rank 3: RuntimeError: on purpose"]
    sweep.end(0, **failure(rank=-1, kind="LaunchError", message="rank 0 did not start\n" * 100))
    (line,) = watch.reasons(status.settle(sweep.path))
    assert line == Abridged("0_toy_ddp: failed: LaunchError: rank 0 did not start rank 0 did not start… ...")
    assert 1000 < len(line) < 1100


@pytest.mark.parametrize(("progress", "step", "rate"), [
    (None, "-", "-"),
    (PROGRESS, "3/60", "41,234"),
    (PROGRESS | {"unit": "samples"}, "3/60", "41,234 samples"),
    (PROGRESS | {"unit": "samples", "per_second": 0.34}, "3/60", "0.340 samples"),
    (PROGRESS | {"per_second": None}, "3/60", "-"),
])  # fmt: skip
def test_a_run_that_goes_on(sweep, progress, step, rate):
    sweep.submit(1)
    sweep.says(_0="RUNNING n1")
    if progress:
        sweep.tell(0, progress)
    (row,) = cells(sweep)
    assert (row["step"], row["tokens/s"]) == (step, rate)


def test_runs_of_this_machine_have_no_job_and_what_their_records_know(sweep):
    path = sweep.begin(0)
    written = store.load_record(path)
    written["config"]["train"] = {"steps": 60}
    store.write_record(path, written | {"steps": 2, "metrics": DONE["metrics"]})
    (row,) = cells(sweep)
    assert (row["state"], row["step"], row["tokens/s"]) == ("unfinished", "2/60", "41,234")
    for number in (1, 2, 3):
        sweep.begin(number)
    sweep.end(0, metrics={**DONE["metrics"], "tokens_per_second": None})
    sweep.end(1, nodes=["vm"], world_size=2)
    sweep.end(2, workload="hello", model=None, parallel=None, steps=None, metrics=None, kind="virtual")
    rows = cells(sweep)
    assert [(row["job"], row["shape"], row["state"], row["tokens/s"]) for row in rows] == [
        ("-", "2 nodes, 4 ranks", "ok", "322 samples"), ("-", "1 node, 2 ranks", "ok", "41,234"),
        ("-", "2 nodes, 4 ranks", "virtual ok", "-"), ("-", "-", "unfinished", "-"),
    ]  # fmt: skip
    assert (rows[2]["run"], watch.as_json(status.settle(sweep.path))["runs"][2]["kind"]) == ("hello", "virtual")


def test_columns_stand_under_each_other_and_reasons_below(sweep):
    sweep.submit(12)
    sweep.end(3)
    sweep.end(7, **failure())
    sweep.says(**{f"_{number}": "PENDING (Resources)" for number in range(12)})
    heading, rule, *rows, reason = watch.table_text(status.settle(sweep.path)).splitlines()
    assert reason == "7_toy_ddp: failed on rank 1: RuntimeError: on purpose"
    assert [row.split()[:2] for row in rows] == [[str(number), f"7_{number}"] for number in range(12)]
    assert rule == "─" * max(map(len, [heading, *rows]))
    for row in rows:
        assert re.split(r"\s{2,}", row)[3] == row[heading.index("shape") :].partition("  ")[0]
        assert row[heading.index("state") :].startswith(("PENDING (Resources)", "ok", "failed"))


class TestWidths:
    @pytest.fixture
    def wide(self, sweep):
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
        lines = watch.table_text(status.settle(wide.path), width).splitlines()[: 2 + 4]
        assert max(map(cell_len, lines)) <= width
        assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "3"]

    def test_narrow_table_keeps_state_and_log_path(self, wide):
        sweep = status.settle(wide.path)
        headings = {
            width: watch.table_text(sweep, width).splitlines()[0].split() for width in (200, 100, 80, 60, 40, 25)
        }
        assert headings == {
            200: " ".join(column.heading for column in watch.COLUMNS).split(),
            100: ["#", "job", "run", "shape", "state", "step", "tokens/s"],
            80: ["#", "job", "run", "shape", "state", "step", "tokens/s"],
            60: ["#", "job", "run", "state", "step", "tokens/s"],
            40: ["#", "job", "run", "state", "step"],
            25: ["#", "run", "state"],
        }
        assert "  RUNNING n[1-16,21-36…  " in watch.table_text(sweep, 60).splitlines()[2]
        text = watch.table_text(sweep, 40)
        assert "\nleft out in 40 columns: shape, tokens/s\n" in text
        assert f"{wide.path}/logs/7_2" in text
        assert all(len(line) <= 40 or str(wide.path) in line for line in text.splitlines())

    def test_the_path_of_a_log_never_falls_to_the_length_of_a_message(self, sweep):
        (job,) = sweep.submit(1)
        sweep.end(0, **failure(message="word " * 5000 + f"; its output is in {job.log}"))
        (line,) = watch.reasons(status.settle(sweep.path))
        assert len(line) < 1200 + len(job.log)
        assert line.endswith(f"; its output is in {job.log}")

    def test_wide_characters_count_twice_and_control_characters_are_shown(self, sweep):
        sweep.begin(0)
        sweep.end(0, model="模型模型模型模型模型模型")
        assert cell_len(watch.table_text(status.settle(sweep.path), 40).splitlines()[2]) <= 40
        sweep.end(0, model="\x1b[31mred\nline")
        assert watch.table_text(status.settle(sweep.path)).splitlines()[2].split()[2:5] == [
            "\\x1b[31mred",
            "line",
            "ddp",
        ]


@pytest.fixture
def steps(monkeypatch):
    """What happens between looks: a list of functions, the last of which the sweep ends with."""
    pending = []

    def sleep(seconds):
        if seconds == status.GRACE:  # the wait for files, not for the queue
            return
        assert pending, "nothing more will happen, and it still waits"
        pending.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)
    return pending


def test_announcement_has_the_commands_for_submitted_jobs(sweep, capsys):
    jobs = sweep.submit(3)
    watch.announce(sweep.path, jobs)
    assert capsys.readouterr().out.splitlines() == [
        "submitted 3 jobs: 7_0 7_1 7_2", f"status     python -m ptdbench status {sweep.path}", "cancel     scancel 7",
        f"output     {sweep.path}/logs",
    ]  # fmt: skip


def test_a_job_of_several_runs_is_one_and_a_hundred_jobs_are_announced_in_few_words(sweep, capsys):
    jobs = sweep.submit(100)
    watch.announce(sweep.path, [replace(job, id="7") for job in jobs])
    first, _, cancel, _ = capsys.readouterr().out.splitlines()
    assert (first, cancel) == ("submitted 1 job with 100 runs: 7", "cancel     scancel 7")
    watch.announce(sweep.path, jobs)
    first, *_ = capsys.readouterr().out.splitlines()
    assert (first[:30], first[-9:]) == ("submitted 100 jobs: 7_0 7_1 7_", " 7_19 ...")


class TestFollowing:
    def test_a_line_for_every_change_and_none_where_there_is_none(self, sweep, steps, capsys):
        sweep.submit(2)
        sweep.says(_0="PENDING (Priority)", _1="PENDING (Priority)")
        steps += [
            lambda: None,
            lambda: sweep.says(_0="RUNNING n1", _1="PENDING (Priority)"),
            lambda: (sweep.end(0), sweep.says(_1="RUNNING n1")),
            lambda: sweep.says(_1="CANCELLED"),
        ]
        watch.follow(sweep.path)
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("job")] == [
            f"job 7_{number} {number}_toy_ddp: {state}"
            for number, state in (
                (0, "PENDING (Priority)"), (1, "PENDING (Priority)"), (0, "RUNNING n1"), (0, "ok"), (1, "RUNNING n1"),
                (1, "failed (CANCELLED)"),
            )
        ]  # fmt: skip

    def test_following_ends_with_the_tracebacks_of_failed_runs(self, sweep, steps, capsys):
        sweep.submit(2)
        sweep.queue = SlurmError("Unable to contact slurm controller")
        sweep.end(0, **failure(rank=3))
        steps += [lambda: sweep.says(_1="RUNNING n1"), lambda: sweep.end(1)]
        watch.follow(sweep.path)
        said = capsys.readouterr().err
        assert "job 7_1 1_toy_ddp: ok\n" in said
        assert "0_toy_ddp, rank 3:\nTraceback (most recent call last):\nRuntimeError: on purpose\n" in said
        assert "1_toy_ddp, rank" not in said

    def test_following_announces_no_earlier_job_again(self, sweep, steps, capsys):
        sweep.submit(2)
        sweep.end(0, **failure())
        sweep.end(1)
        assert watch.follow(sweep.path, {"0_toy_ddp"}) == {"0_toy_ddp", "1_toy_ddp"}
        assert capsys.readouterr().err == "job 7_1 1_toy_ddp: ok\n"

    def test_a_run_that_was_never_submitted_is_not_waited_for(self, sweep, steps, capsys):
        """As those of a killed submission, where one of its runs goes on: noted down, or only begun."""
        jobs = sweep.submit(2)
        status.ledger.write(sweep.path, status.ledger.Ledger([], [jobs[0], replace(jobs[1], name="other", id=None)]))
        sweep.begin(2)
        sweep.says(_0="RUNNING n1")
        steps += [lambda: sweep.end(0)]
        assert watch.follow(sweep.path) == {"0_toy_ddp"}
        assert capsys.readouterr().err.splitlines()[-1] == "job 7_0 0_toy_ddp: ok"

    def test_following_escapes_control_characters(self, sweep, steps, capsys):
        sweep.submit(2)
        sweep.end(0, **failure(message="\x1b[2J\x07 \x9b"))
        (_, job) = status.ledger.read(sweep.path).jobs
        sweep.log(job, 0, "\x1b]0;title\x07")
        sweep.says(_1="NODE_FAIL n1")
        watch.follow(sweep.path)
        said = capsys.readouterr().err
        assert "RuntimeError: \\x1b[2J\\x07 \\x9b\n" in said
        assert "\\x1b]0;title\\x07" in said
        assert plain(said) == said

    def test_following_ends_with_the_output_without_a_traceback(self, sweep, steps, capsys):
        (job,) = sweep.submit(1)
        sweep.log(job, 0, "".join(f"line {number}\n" for number in range(100)))
        sweep.log(job, 1, "")
        sweep.says(_0="NODE_FAIL n1")
        watch.follow(sweep.path)
        said = capsys.readouterr().err
        assert f"{job.directory}, the end of its output:\nline 85\n" in said
        assert said.rstrip().endswith("line 99")

    def test_a_signal_leaves_the_jobs_to_themselves_and_says_so(self, sweep, steps, capsys):
        sweep.submit(1)
        sweep.says(_0="RUNNING n1")
        steps += [Mock(side_effect=Stopped(2))]
        with pytest.raises(Stopped):
            watch.follow(sweep.path)
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == f"The jobs keep running. Look at them with: python -m ptdbench status {sweep.path}"
        assert sweep.results() == []
