"""Where runs stand, from their files and what SLURM says: on this machine, submitted, ended, killed, forgotten."""

import errno
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec import to_builtins
from msgspec.structs import asdict, replace

from ptdbench.launch import slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.records import ledger, record, store
from ptdbench.records.ownership import Progress, this_process
from ptdbench.sweep import status, watch
from tests.sweep.made import CONFIG, DONE, PROGRESS, failure, state

#: What a run adds to its record that was asked to end.
HEARD = failure(rank=0, kind="Stopped", message="stopped by SIGTERM") | {"status": "preempted"}


def states(sweep):
    """Of every run: its directory, whether it is over, and its record's status."""
    return [(run.directory, run.is_over, run.record.status) for run in status.settle(sweep.path).runs]


class TestOnThisMachine:
    def test_runs_stand_in_the_order_of_their_numbers_whenever_they_ended(self, sweep):
        for number in (0, 1, 2, 10):
            sweep.begin(number)
        for number in (10, 0, 2):
            sweep.end(number)
        seen = status.settle(sweep.path)
        assert [run.directory for run in seen.runs] == [f"{number}_toy_ddp" for number in (0, 1, 2, 10)]
        assert [run.is_over for run in seen.runs] == [True, False, True, True]
        assert (seen.is_over, seen.silence) == (False, "")
        assert [run.job for run in seen.runs] == [None] * 4
        assert sweep.asked == []

    def test_sweep_is_not_over_between_two_runs(self, sweep):
        sweep.begin(0)
        sweep.end(0)
        assert status.settle(sweep.path).is_over
        store.lock(sweep.path, "hydra.sweep.dir")  # by the process that carries it out
        assert not status.settle(sweep.path).is_over

    def test_runs_in_folders_of_folders(self, sweep):
        """By ``hydra.sweep.subdir=${model.name}/${parallel.name}``; what only tries a micro-batch is no run."""
        ledger.begin(sweep.path, [])
        for name in ("toy/ddp", "toy/ddp/tries/0_2", "gpt_tiny/ddp"):
            (sweep.path / name).mkdir(parents=True)
            store.write_record(sweep.path / name, record.begin(CONFIG, sweep.path / name, {}))
        store.write_record(sweep.path / name, store.load_record(sweep.path / name) | DONE)
        assert states(sweep) == [("gpt_tiny/ddp", True, "ok"), ("toy/ddp", False, "failed")]

    def test_a_single_run(self, sweep, monkeypatch):
        path = sweep.begin(0)
        sweep.tell(0, PROGRESS)
        (run,) = status.settle(path).runs
        assert (run.progress, run.is_over) == (Progress(**PROGRESS), False)
        monkeypatch.chdir(path)
        assert status.settle(Path()).runs[0].directory == path.name
        sweep.end(0)
        (run,) = status.settle(path).runs
        assert (run.is_over, run.record.status) == (True, "ok")

    @pytest.mark.parametrize("name", ["../mine", "/mine", "a/../../mine"])
    def test_a_list_of_jobs_reaches_no_run_of_another_folder(self, sweep, name):
        """A sweep that somebody sent, looked at where there is a queue, which has never heard of its jobs."""
        mine = sweep.path.with_name("mine")
        mine.mkdir()
        store.write_record(mine, record.begin(CONFIG, mine, {}))
        before = (mine / store.RECORD).read_bytes()
        (job,) = sweep.submit(1)
        directory = str(mine) if name == "/mine" else name
        ledger.write(sweep.path, ledger.Ledger([], [job, replace(job, number=1, directory=directory)]))
        seen = status.settle(sweep.path)
        assert [run.directory for run in seen.runs] == [job.directory]
        assert seen.damage == [f"{sweep.path}/sweep.json: not below the sweep, and left out: the runs of jobs 1"]
        assert (mine / store.RECORD).read_bytes() == before

    @pytest.mark.parametrize("name", ["sweep", "renamed"])
    def test_a_sweep_that_was_moved(self, sweep, tmp_path, name):
        sweep.submit(2)
        sweep.end(0)
        sweep.end(1, **failure())
        (tmp_path / "elsewhere").mkdir()
        moved = sweep.path.rename(tmp_path / "elsewhere" / name)
        assert [(run.job.number, run.record.status) for run in status.settle(moved).runs] == [(0, "ok"), (1, "failed")]
        assert sweep.asked == []


@pytest.mark.parametrize(("job", "started", "more"), [
    (None, 0.0, {}), (None, 0.0, {"launcher": "local"}), ("8", 0.0, {}), (None, None, {}),
    (None, 0.0, {"launcher": "mpirun"}), (None, 0.0, {"config": {"repeat": {"series": "a"}}}),
], ids=["killed", "killed local", "job", "alive", "mpirun", "comparison"])  # fmt: skip
def test_a_killed_run_of_this_machine_says_how_to_resume_its_sweep(sweep, job, started, more):
    for number in range(2):
        path = sweep.begin(number)
    sweep.end(0)
    ledger.begin(sweep.path, ["model=toy"])
    owner = to_builtins(this_process("start", {"SLURM_JOB_ID": job} if job else {}))
    owner |= {} if started is None else {"started": started}
    store.write_record(path, store.load_record(path) | {"owner": owner, "sources": ["--config-dir", "my conf"]} | more)
    sweep.queue = {"8": state("8", "RUNNING n1")}
    is_killed = started is not None and job is None and more in ({}, {"launcher": "local"})
    below = f"killed; resume with python train.py --config-dir 'my conf' sweep.resume={sweep.path}"
    for folder, expected in (
        (sweep.path, below),
        (path, below.replace(f"sweep.resume={sweep.path}", f"resume={path}")),
    ):
        seen = status.settle(folder)
        last = watch.table_text(seen).splitlines()[-1]
        assert last == expected if is_killed else "killed" not in last
        assert watch.as_json(seen)["killed"] == ([expected.removeprefix("killed; resume with ")] if is_killed else [])


class TestSharedJob:
    def test_a_run_waits_for_those_before_it_and_has_ended_before_its_job(self, sweep):
        sweep.submit_together(4)
        sweep.says(**{"": "PENDING (Resources)"})
        assert shown(sweep) == ["PENDING (Resources)"] * 4
        sweep.end(0)
        sweep.end(1, **failure())
        begin(sweep, 2)
        sweep.says(**{"": "RUNNING n1"})
        assert shown(sweep) == ["ok", "failed", "RUNNING n1", "waits in its job"]
        assert [run.queue is not None for run in status.settle(sweep.path).runs] == [False, False, True, True]

    def test_open_runs_of_an_ended_job_are_concluded(self, sweep):
        jobs = sweep.submit_together(3)
        sweep.end(0)
        begin(sweep, 1)
        sweep.log(jobs[1], 0, "slurmstepd: error: Detected 1 oom_kill event in StepId=7.1\n")
        sweep.says(**{"": "FAILED n1"})
        assert states(sweep) == [("0_toy_ddp", True, "ok"), ("1_toy_ddp", True, "oom"), ("2_toy_ddp", True, "failed")]

    def test_script_log_concerns_only_runs_that_began(self, sweep):
        first, second = sweep.submit_together(2)
        begin(sweep, 0)
        sweep.log(replace(first, log=str(Path(first.log).parent)), 0, "srun: error: n1: task 0: Out Of Memory\n")
        sweep.says(**{"": "FAILED n1"})
        assert [found for *_, found in states(sweep)] == ["oom", "failed"]
        message = status.settle(sweep.path).runs[1].record.error.message
        assert message.startswith("SLURM ended job 7 on n1: FAILED, before this run had begun; ")
        assert status.log_tail(second) == "srun: error: n1: task 0: Out Of Memory"

    def test_a_run_that_was_asked_to_end_is_over_when_the_job_is(self, sweep):
        sweep.submit_together(2)
        sweep.end(0, **HEARD)
        sweep.says(**{"": "RUNNING n1"})
        assert [is_over for _, is_over, _ in states(sweep)] == [False, False]
        sweep.says(**{"": "TIMEOUT n1"})
        assert [found for *_, found in states(sweep)] == ["timeout", "timeout"]


def begin(sweep, number, job="7", launch="l"):
    path = sweep.path / f"{number}_toy_ddp"
    owner = asdict(this_process(launch, {})) | {"job": job}
    store.write_record(path, store.load_record(path) | {"owner": owner})
    return path


def shown(sweep):
    return [watch.state_text(run) for run in status.settle(sweep.path).runs]


class TestSubmitted:
    def test_a_run_that_waits_and_one_that_is_going_on(self, sweep):
        jobs = sweep.submit(2)
        sweep.says(_0="RUNNING n[1-2]", _1="PENDING (Priority)")
        sweep.tell(0, PROGRESS)
        going, waiting = status.settle(sweep.path).runs
        assert (going.job, waiting.job) == tuple(jobs)
        assert (going.queue.state, going.queue.nodes, going.progress) == ("RUNNING", "n[1-2]", Progress(**PROGRESS))
        assert (waiting.queue.state, waiting.queue.reason, waiting.progress) == ("PENDING", "Priority", None)
        assert (going.is_over, waiting.is_over) == (False, False)
        assert sweep.results() == []  # looking changes nothing

    def test_the_queue_is_asked_only_about_those_without_a_result(self, sweep):
        sweep.submit(3)
        sweep.end(1)
        sweep.says(_0="PENDING", _2="PENDING")
        assert [run[1:] for run in states(sweep)] == [(False, "failed"), (True, "ok"), (False, "failed")]
        assert sweep.asked == [["7_0", "7_2"]]
        sweep.says(_1="COMPLETING n1")  # still leaving its nodes
        assert status.settle(sweep.path).runs[1].is_over

    @pytest.mark.parametrize(
        ("said", "changes"),
        [({"_0": "CANCELLED"}, {}), ({}, {}), ({"_0": "FAILED (NonZeroExitCode)"}, failure())],
        ids=["killed", "forgotten", "failed by itself"],
    )
    def test_a_job_that_ended_between_its_record_and_the_results_of_the_sweep(self, sweep, said, changes):
        sweep.submit(1)
        written = sweep.end(0, **changes)
        sweep.says(**said)
        for _ in range(2):  # whoever looks again does not write again
            (run,) = status.settle(sweep.path).runs
            assert (run.record.written, run.is_over) == (written, True)
            assert store.load_record(sweep.path / "0_toy_ddp") == written

    def test_a_job_whose_id_nobody_wrote_down_is_found_by_its_name(self, sweep):
        sweep.submit(2, known=False)
        sweep.says(_0="RUNNING n1", _1="FAILED")
        going, ended = status.settle(sweep.path).runs
        assert (going.job.id, going.queue.state, going.is_over) == ("7_0", "RUNNING", False)
        assert (ended.job.id, ended.is_over) == ("7_1", True)
        assert ended.record.error.message.startswith("SLURM ended job 7_1: FAILED")

    @pytest.mark.parametrize(("owner", "concluded"), [("7_0", True), (None, True), ("6", False)])
    def test_a_job_that_was_refused_a_run_says_nothing_of_how_it_ends(self, sweep, owner, concluded):
        """The run is another job's, which goes on."""
        sweep.submit(1)
        path = begin(sweep, 0, job=owner)
        sweep.says(_0="FAILED")
        status.settle(sweep.path)
        assert record.is_open(store.load_record(path)) is not concluded

    def test_a_job_that_slurm_does_not_know_by_its_name_was_not_submitted(self, sweep):
        sweep.submit(1, known=False)
        sweep.says()
        (run,) = status.settle(sweep.path).runs
        assert (run.job.id, run.queue, run.is_over) == (None, None, False)
        assert watch.state_text(run) == "not submitted"
        assert sweep.results() == []  # it may be on its way

    def test_a_run_that_was_refused_has_no_job_and_its_place_among_the_others(self, sweep):
        refused, *jobs = sweep.submit(3)
        ledger.write(sweep.path, ledger.Ledger([], jobs))
        sweep.end(0, **failure(rank=-1, kind="ConfigError"))
        sweep.says(_1="PENDING", _2="PENDING")
        seen = status.settle(sweep.path).runs
        assert [run.job for run in seen] == [None, *jobs]
        assert seen[0].record.directory.endswith(refused.directory)


class TestEndedByTheCluster:
    @pytest.mark.parametrize(("words", "expected"), [
        ("TIMEOUT n1", "timeout"), ("DEADLINE", "timeout"), ("OUT_OF_MEMORY n1", "oom"), ("CANCELLED n1", "failed"),
        ("PREEMPTED n1", "preempted"), ("NODE_FAIL n1", "failed"), ("BOOT_FAIL n1", "failed"),
        ("FAILED n1", "failed"), ("FAILED (JobLaunchFailure)", "failed"),
        ("COMPLETED n1", "failed"),  # srun ended well, and yet the run said nothing
        ("", "failed"),  # SLURM has forgotten it
    ])  # fmt: skip
    def test_a_run_without_a_word_gets_slurms_reason(self, sweep, words, expected):
        (job,) = sweep.submit(1)
        sweep.says(**({"_0": words} if words else {}))
        seen = status.settle(sweep.path)
        (run,) = seen.runs
        name, _, rest = words.partition(" ")
        error = run.record.error
        assert (run.record.status, error.rank, error.type) == (expected, -1, name or "Gone")
        why, where = (f" {rest}", "") if "(" in rest else ("", rest and f" on {rest}")
        gone = "job 7_0 is not in the queue any more and left no result"
        told = f"SLURM ended job 7_0{where}: {name}{why}" if words else gone
        assert error.message == f"{told}; its output is in {job.log}"
        assert seen.is_over
        assert store.load_record(sweep.path / job.directory) == run.record.written == sweep.results()[0]

    def test_a_job_that_never_began_has_no_output(self, sweep):
        sweep.submit(1)
        sweep.says(_0="CANCELLED (Resources)")
        (run,) = status.settle(sweep.path).runs
        assert (run.record.status, run.record.error.type) == ("failed", "CANCELLED")
        assert run.record.error.message == "SLURM ended job 7_0 before it began: CANCELLED"

    @pytest.mark.parametrize(("written", "expected"), [
        (
            "slurmstepd-n1: error: pyxis: no such image\nslurmstepd-n1: error: task_init() failed\n"
            "srun: error: n1: task 0: Exited with exit code 1\n",
            "pyxis: no such image",
        ),
        ("Traceback:\n  ...\n/usr/bin/python: No module named submitit\nsrun: error: ...\n", "No module named"),
    ])  # fmt: skip
    def test_a_step_that_did_not_start_says_why(self, sweep, written, expected):
        (job,) = sweep.submit(1)
        sweep.says(_0="FAILED n1")
        sweep.log(job, 0, written)
        (run,) = status.settle(sweep.path).runs
        assert expected in run.record.error.message.split("; its output")[0]
        assert "srun" not in run.record.error.message

    def test_slurmd_error_before_the_log_folder_is_the_reason(self, sweep):
        sweep.submit(1)
        sweep.says(_0="FAILED n1")
        (sweep.path / "logs").mkdir()
        (sweep.path / "logs" / "7_0_slurm.log").write_text("slurmstepd-n1: error: cannot change to /gone\n")
        (run,) = status.settle(sweep.path).runs
        assert run.record.error.message.startswith("SLURM ended job 7_0 on n1: FAILED: cannot change to /gone; ")

    @pytest.mark.parametrize(
        ("said", "words", "expected"),
        [
            ("slurmstepd-n1: error: StepId=1.0 exceeded memory limit (147 > 104), being killed", "FAILED", "oom"),
            ("slurmstepd-n1: error: Exceeded job memory limit", "FAILED (NonZeroExitCode)", "oom"),
            ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.", "FAILED", "oom"),
            ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "FAILED", "oom"),
            ("srun: error: n1: task 0: Out Of Memory", "FAILED", "oom"),
            ("srun: error: n1: task 0: Out Of Memory", "NODE_FAIL n1", "failed"),  # SLURM has said why
            ("the model said: exceeded memory limit", "FAILED", "failed"),
            ("srun: error: n1: tasks 0-1: Killed", "FAILED", "failed"),
        ],
    )  # fmt: skip
    def test_slurms_words_of_memory_are_read_where_its_state_says_only_failed(self, sweep, said, words, expected):
        """OverMemoryKill, in the words of Slurm 22.05 and of others."""
        (job,) = sweep.submit(1)
        sweep.log(job, 0, "a warning\n")
        sweep.log(job, 1, f"before\n{said}\nafter\n")
        sweep.log(replace(job, id="7_1"), 0, "srun: error: n1: task 0: Out Of Memory\n")  # one folder, another job
        sweep.says(_0=words)
        (run,) = status.settle(sweep.path).runs
        assert run.record.status == expected
        error = run.record.error
        assert error.message.endswith(f"; its output is in {job.log}")
        if expected == "oom":
            assert error.type == "OUT_OF_MEMORY"
            assert f"SLURM ended job 7_0: {words}; SLURM said: {said}; its output" in error.message

    def test_a_signal_that_the_run_heard_is_told_in_slurms_words(self, sweep):
        """SIGTERM reads as a preemption to the run; that it was the time limit only SLURM knows."""
        sweep.submit(4)
        for number in range(4):
            sweep.end(number, **HEARD)
        sweep.says(_0="TIMEOUT n1", _1="CANCELLED n1", _2="PREEMPTED n1", _3="FAILED n1")
        for _ in range(2):
            seen = [(run.record.status, run.record.error.type) for run in status.settle(sweep.path).runs]
            told_by_slurm = [("timeout", "TIMEOUT"), ("failed", "CANCELLED"), ("preempted", "PREEMPTED")]
            assert seen == [*told_by_slurm, ("preempted", "Stopped")]
        assert sweep.asked == [["7_0", "7_1", "7_2", "7_3"], ["7_3"]]

    def test_preempted_run_on_its_nodes_is_not_over(self, sweep):
        sweep.submit(2)
        for number in range(2):
            sweep.end(number, **HEARD)
        sweep.says(_0="COMPLETING n1", _1="PENDING (BeginTime)")  # the second is queued again
        seen = status.settle(sweep.path)
        assert [(run.is_over, run.queue.state) for run in seen.runs] == [(False, "COMPLETING"), (False, "PENDING")]

    @pytest.mark.parametrize("silent", [True, False], ids=["no answer", "forgotten"])
    def test_preempted_run_stays_so_without_word_from_slurm(self, sweep, silent):
        sweep.submit(1)
        sweep.end(0, **HEARD)
        sweep.queue = SlurmError("squeue is not on PATH") if silent else {}
        assert states(sweep) == [("0_toy_ddp", True, "preempted")]
        assert len(sweep.results()) == 1

    def test_a_thousand_of_them_are_waited_for_once(self, sweep, monkeypatch):
        sweep.submit(50)
        sweep.says(**{f"_{number}": "CANCELLED" for number in range(50)})
        waits = []
        monkeypatch.setattr(time, "sleep", waits.append)
        assert status.settle(sweep.path).is_over
        assert waits == [status.GRACE]
        assert len(sweep.results()) == 50

    def test_record_written_late_is_still_read(self, sweep, monkeypatch):
        """Network file systems: the queue knows that the job has ended before its record can be read."""
        sweep.submit(1)
        sweep.says(_0="COMPLETED n1")
        monkeypatch.setattr(time, "sleep", lambda seconds: sweep.end(0))
        assert states(sweep) == [("0_toy_ddp", True, "ok")]

    def test_a_sweep_of_somebody_else_is_looked_at_all_the_same(self, sweep, monkeypatch):
        """Nothing can be written into it, so that each look finds out by itself how a job ended."""

        sweep.submit(1)
        sweep.says(_0="CANCELLED")
        refused = PermissionError(errno.EACCES, "Permission denied", "results.jsonl")
        monkeypatch.setattr(status, "conclude", Mock(side_effect=refused))
        seen = status.settle(sweep.path)
        assert seen.is_over
        assert [run.directory for run in seen.runs] == ["0_toy_ddp"]
        assert seen.damage == ["results.jsonl: Permission denied; how jobs ended is not written down"]


class TestDamaged:
    """What counts as damage is in test_damaged_files."""

    def test_a_run_of_this_machine_stands_among_the_others(self, sweep):
        for number in range(3):
            sweep.begin(number)
        sweep.end(0)
        path = sweep.path / "1_toy_ddp" / store.RECORD
        path.write_bytes(b"{}")
        assert [run[1:] for run in states(sweep)] == [(True, "ok"), (True, "damaged"), (False, "failed")]
        (single,) = status.settle(path.parent).runs
        assert single.record.error.message.startswith(f"{path} is damaged: ")
        assert "\n" not in single.record.error.message

    @pytest.mark.parametrize("text", [b"{}", None], ids=["damaged", "gone"])
    def test_damaged_submitted_run_is_over_with_its_job(self, sweep, text):
        sweep.submit(2)
        path = sweep.path / "0_toy_ddp" / store.RECORD
        path.write_bytes(text) if text else path.unlink()
        sweep.queue = SlurmError("Unable to contact slurm controller")
        assert [run[1:] for run in states(sweep)] == [(False, "damaged"), (False, "failed")]
        sweep.says(_0="RUNNING n1", _1="TIMEOUT")
        assert [run[1:] for run in states(sweep)] == [(False, "damaged"), (True, "timeout")]
        sweep.says(_0="FAILED")
        assert [run[1:] for run in states(sweep)] == [(True, "damaged"), (True, "timeout")]
        assert (path.read_bytes() if path.exists() else None) == text
        assert len(sweep.results()) == 1

    def test_a_list_of_jobs_is_told_and_the_runs_are_shown(self, sweep):
        sweep.submit(2)
        sweep.end(0)
        (sweep.path / ledger.LEDGER).write_bytes(b"{}")
        seen = status.settle(sweep.path)
        assert [(run.is_over, run.job) for run in seen.runs] == [(True, None), (False, None)]
        (line,) = seen.damage
        assert line.startswith(f"{sweep.path / 'sweep.json'} is damaged: ")


def test_nothing_is_concluded_where_slurm_does_not_answer(sweep):
    jobs = sweep.submit(3)
    sweep.end(0)
    sweep.queue = SlurmError("Unable to contact slurm controller")
    seen = status.settle(sweep.path)
    assert seen.silence == "Unable to contact slurm controller"
    assert [(run.is_over, run.queue) for run in seen.runs] == [(True, None), (False, None), (False, None)]
    assert len(sweep.results()) == 1
    assert store.load_record(sweep.path / jobs[2].directory)["error"]["type"] == "Unfinished"
    sweep.says(_1="FAILED", _2="RUNNING n1")  # it answers again
    assert [run.is_over for run in status.settle(sweep.path).runs] == [True, True, False]


def test_nothing_is_concluded_on_another_cluster(sweep, monkeypatch):
    (job,) = sweep.submit(1)
    ledger.add(sweep.path, [replace(job, cluster="there")])
    monkeypatch.setattr(slurm, "clusters", lambda: ["here"])
    seen = status.settle(sweep.path)
    assert seen.silence == "its jobs are on cluster there, and this is here"
    assert (seen.is_over, sweep.results()) == (False, [])
    monkeypatch.setattr(slurm, "clusters", lambda: ["here", "there"])
    assert status.settle(sweep.path).is_over


def begin_again(sweep, number):
    """``sweep.resume``: a run that failed is begun once more."""
    path = sweep.path / f"{number}_toy_ddp"
    store.write_record(path, record.begin(CONFIG, path, {}))


def test_a_run_of_this_machine_that_is_done_once_more_goes_on(sweep):
    sweep.begin(0)
    sweep.end(0, **failure())
    begin_again(sweep, 0)
    sweep.tell(0, PROGRESS)
    looked = status.settle(sweep.path)
    assert not looked.is_over
    (told,) = watch.as_json(looked)["runs"]
    assert (told["status"], told["is_over"], told["step"]) == ("unfinished", False, PROGRESS["step"])
    sweep.end(0)
    assert states(sweep) == [("0_toy_ddp", True, "ok")]


def test_a_run_that_is_done_once_more_is_not_over_with_its_earlier_result(sweep):
    """``sweep.resume`` on a cluster: the run that failed waits in the queue again, and then ends well."""
    sweep.submit(1)
    sweep.end(0, status="failed", error=failure())
    begin_again(sweep, 0)
    sweep.says(_0="PENDING (Priority)")
    assert not status.settle(sweep.path).is_over
    sweep.end(0)
    sweep.says(_0="COMPLETED")
    looked = status.settle(sweep.path)
    assert looked.is_over
    assert [run.record.status for run in looked.runs] == ["ok"]
