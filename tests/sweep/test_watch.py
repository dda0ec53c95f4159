"""Following a sweep on the cluster: what is announced, what each change looks like, how it ends and what is left."""

from __future__ import annotations

import io
import re
import time

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from ptdbench.launch.local import Stopped
from ptdbench.launch.slurm import SlurmError
from ptdbench.records import store
from ptdbench.sweep import status, watch
from ptdbench.terminal import plain
from tests.sweep.made import failure


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


def test_what_was_submitted_can_be_followed_and_ended_from_any_shell(sweep, capsys):
    watch.announce(sweep.path, sweep.submit(3))
    assert capsys.readouterr().out.splitlines() == [
        "submitted 3 jobs: 7_0 7_1 7_2",
        f"status     python -m ptdbench status {sweep.path}",
        "cancel     scancel 7",
        f"output     {sweep.path}/logs",
    ]


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

    def test_it_waits_where_slurm_does_not_answer_and_ends_with_the_tracebacks_of_what_failed(
        self, sweep, steps, capsys
    ):
        sweep.submit(2)
        sweep.queue = SlurmError("Unable to contact slurm controller")
        sweep.end(0, **failure(rank=3))
        steps += [lambda: sweep.says(_1="RUNNING n1"), lambda: sweep.end(1)]
        watch.follow(sweep.path)
        said = capsys.readouterr().err
        assert "job 7_1 1_toy_ddp: ok\n" in said
        assert "0_toy_ddp, rank 3:\nTraceback (most recent call last):\nRuntimeError: on purpose\n" in said
        assert "1_toy_ddp, rank" not in said

    def test_what_was_told_of_earlier_jobs_is_not_told_again(self, sweep, steps, capsys):
        sweep.submit(2)
        sweep.end(0, **failure())
        sweep.end(1)
        assert watch.follow(sweep.path, {"0_toy_ddp"}) == {"0_toy_ddp", "1_toy_ddp"}
        assert capsys.readouterr().err == "job 7_1 1_toy_ddp: ok\n"

    def test_what_others_wrote_cannot_steer_the_terminal(self, sweep, steps, capsys):
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

    def test_or_with_the_end_of_the_output_where_there_is_no_traceback(self, sweep, steps, capsys):
        (job,) = sweep.submit(1)
        sweep.log(job, 0, "".join(f"line {number}\n" for number in range(100)))
        sweep.log(job, 1, "")
        sweep.says(_0="NODE_FAIL n1")
        watch.follow(sweep.path)
        said = capsys.readouterr().err
        assert f"{job.directory}, the end of its output:\nline 85\n" in said
        assert said.rstrip().endswith("line 99")

    def test_a_signal_leaves_the_jobs_to_themselves_and_says_so(self, sweep, steps, capsys):
        def stop():
            raise Stopped(2)

        sweep.submit(1)
        sweep.says(_0="RUNNING n1")
        steps += [stop]
        with pytest.raises(Stopped):
            watch.follow(sweep.path)
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == f"The jobs go on. Look at them with: python -m ptdbench status {sweep.path}"
        assert sweep.results() == []


class TestSettling:
    def test_a_job_of_this_machine_that_left_no_word(self, sweep, capsys):
        path = sweep.begin(0)
        watch.settle(sweep.path, path.name, "logs/1/1_log.err")
        written = store.load_record(path)
        assert (written["status"], written["error"]["type"]) == ("failed", "Gone")
        assert written["error"]["message"].endswith("its output is in logs/1/1_log.err")
        assert sweep.results() == [written]
        sweep.begin(1)
        ok = sweep.end(1)
        watch.settle(sweep.path, "1_toy_ddp", "logs/1/1_log.err")  # it did, and is left as it is
        assert sweep.results() == [written, ok]
        assert capsys.readouterr().err == "0_toy_ddp: failed\n1_toy_ddp: ok\n"


def test_where_not_all_fit_those_that_still_change_are_shown(sweep):
    sweep.submit(4)
    sweep.end(0)
    sweep.end(2)
    sweep.says(_1="RUNNING n1", _3="PENDING")
    runs = status.look(sweep.path).runs
    assert [run.job.number for run in watch._first_the_open(runs)] == [1, 3, 0, 2]


@pytest.mark.parametrize(("width", "height"), [(120, 24), (80, 24), (80, 10), (60, 10), (40, 8), (40, 4)])
def test_the_table_never_grows_out_of_the_terminal_and_loses_no_line(sweep, width, height):
    sweep.submit(12)
    sweep.queue = SlurmError("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    table = watch._Table(console)
    with table:
        table(status.look(sweep.path))
        sweep.says(**{f"_{number}": "PENDING (QOSMaxJobsPerUserLimit)" for number in range(12)})
        console.file.seek(0)
        console.file.truncate()
        table(status.look(sweep.path))
        drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in console.file.getvalue().split("\n")]
    *rows, below = drawn
    shown = min(12, height - 4) if height > 4 else 1
    assert len(rows) == 2 + shown
    assert max(map(cell_len, drawn)) <= width
    assert [row.split()[0] for row in rows[2:]] == [str(number) for number in range(shown)]
    assert below.startswith("0 of 12 have ended")
    assert ("more are" in below) == (shown < 12)
