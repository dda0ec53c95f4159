"""Sweeps on a real SLURM of two nodes, by whole commands, as they are typed.

A job costs seconds here, of which nearly all are Python and torch starting once for each rank: several tests look at
one sweep, and what can be tested without a job is, in tests/sweep.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ptdbench.records import store
from tests.conftest import outputs
from tests.forked import train_py
from tests.launch.faulty import FAULTY
from tests.programs import TRAIN, call, until

PTDBENCH = (sys.executable, "-m", "ptdbench")
TOY = ("cluster=slurm", "model=toy", "train.steps=4", "device=cpu")
HELLO = ("cluster=slurm", "workload=hello", "device=cpu")
FAILS = ("cluster=slurm", *FAULTY, "train.steps=4", "device=cpu")

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, slurm: dict[str, str]) -> Run:
    return partial(call, cwd=tmp_path, environ=slurm)


@pytest.fixture
def submit(tmp_path: Path, slurm: dict[str, str]) -> Run:
    return partial(train_py, cwd=tmp_path, environ=slurm)


@pytest.fixture
def jobs(run: Run, slurm: dict[str, str]) -> Callable[[], set[str]]:
    def listed() -> set[str]:
        lines = run("squeue", "--noheader", "--states=all", "--format=%i %w").stdout.splitlines()
        return {line for line in lines if line.endswith(f" {slurm['SBATCH_WCKEY']}")}

    return listed


def sweep(folder: Path) -> Path:
    (directory,) = outputs(folder)
    return directory


def records(folder: Path) -> list[dict[str, Any]]:
    results = [record.written for record in store.read_results(sweep(folder))]
    found = sorted(results, key=lambda record: Path(record["directory"]).name)
    for record in found:
        assert json.loads((Path(record["directory"]) / "record.json").read_text()) == record
    return found


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, slurm_of_module) -> tuple[Path, Done]:
    """A sweep of which one run fails on the last rank, one is sound, and two are refused."""
    folder = tmp_path_factory.mktemp("faulty")
    asked = ("cluster.nodes=2", "cluster.ranks_per_node=1", "+model.how=raise", "+model.rank=1,99")
    said = train_py(*FAILS, *asked, "train.global_batch=16,15", cwd=folder, environ=slurm_of_module, timeout=240)
    return folder, said


class TestSweep:
    def test_failed_rank_ends_only_its_job(self, faulty):
        """And what is refused beforehand is a row, and no job."""
        folder, done = faulty
        assert done.returncode == 1
        assert done.stdout.startswith("submitted 2 jobs: ")
        failed, refused, sound, _ = records(folder)
        assert (refused["status"], refused["error"]["type"], refused["launcher"]) == ("failed", "ConfigError", None)
        assert "train.global_batch=15: must be a multiple of " in refused["error"]["message"]
        error = failed["error"]
        assert (failed["status"], failed["world_size"]) == ("failed", 2)
        assert (error["rank"], error["type"], error["message"]) == (1, "RuntimeError", "this one is on purpose")
        assert "faulty.py" in error["traceback"]
        directory = Path(failed["directory"]).name
        assert f"{directory}, rank 1:\n{error['traceback']}" in done.stderr
        assert (sound["status"], sound["error"]) == ("ok", None)
        assert done.stdout.count(": failed on rank ") == 1

    def test_results_of_jobs_are_one_table(self, faulty, run):
        folder, done = faulty
        sound = records(folder)[2]
        assert (sound["status"], sound["launcher"]) == ("ok", "srun")
        assert (sound["world_size"], sound["nodes"]) == (2, ["n1", "n2"])
        spent = sound["metrics"]["startup_seconds"]
        assert set(spent) == {"import", "config", "rendezvous", "build", "first_step"}
        assert all(seconds >= 0 for seconds in spent.values())
        assert sound["final_loss"] is not None
        assert done.stdout.count("step ms") == 1  # one table
        first, *_ = done.stdout.splitlines()
        (array,) = {word.partition("_")[0] for word in first.removeprefix("submitted 2 jobs: ").split()}
        assert f"cancel     scancel {array}" in done.stdout.splitlines()
        # Which states of the queue are seen on the way is a matter of time.
        assert f"job {array}_1 {Path(sound['directory']).name}: ok" in done.stderr.splitlines()

        seen = run(*PTDBENCH, "status", str(sweep(folder)))
        assert seen.returncode == 1
        rows = [line.split() for line in seen.stdout.splitlines() if f" {array}_" in line]
        assert [(row[1], row[2:4]) for row in rows] == [(f"{array}_{job}", ["Faulty", "ddp"]) for job in range(2)]
        assert ["ok" in row for row in rows] == [False, True]


def test_submit_test_submits_and_writes_nothing(submit, tmp_path, jobs):
    before = jobs()
    done = submit(*HELLO, "cluster.submit=test", "cluster.nodes=1,2", "seed=0,1")
    assert (done.returncode, done.stderr) == (0, "")
    one, two = done.stdout.splitlines()
    assert one.startswith("1 node x 2 ranks (2 jobs): Job ")
    assert two.startswith("2 nodes x 2 ranks (2 jobs): Job ")
    assert (jobs() - before, list(tmp_path.iterdir())) == (set(), [])


def test_sbatch_script_runs(run, tmp_path):
    script = run(*PTDBENCH, "sbatch", "workload=hello", "device=cpu", "cluster.nodes=2", "cluster.ranks_per_node=1")
    assert (script.returncode, script.stderr) == (0, "")
    submitted = run("sbatch", "--parsable", told=script.stdout)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    until(
        lambda: any(store.load_record(path.parent)["status"] == "ok" for path in tmp_path.glob("outputs/*/record.json"))
    )
    until(lambda: run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").stdout == "COMPLETED\n")
    log = (tmp_path / f"ptdbench-{job}.log").read_text()
    assert "2 ranks on 2 nodes, started by srun, over gloo at n1:" in log
    (path,) = tmp_path.glob("outputs/*/record.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["world_size"], record["nodes"]) == ("ok", 2, ["n1", "n2"])


class TestRefused:
    """Bad input: a message that says what to try, exit status 1, nothing submitted, nothing left behind."""

    def test_refusal_is_one_line_and_nothing_is_submitted(self, submit, jobs, tmp_path):
        before = jobs()
        done = submit(*TOY, "cluster.nodes=3", "train.global_batch=18")
        assert (done.returncode, done.stdout) == (1, "")
        told = "cluster=slurm: nothing was submitted, because SLURM refuses 3 nodes x 2 ranks: "
        assert (done.stderr.startswith(told), done.stderr.count("\n")) == (True, 1)
        assert (jobs() - before, list(tmp_path.iterdir())) == (set(), [])

    def test_ranks_submit_no_jobs(self, run, jobs, tmp_path):
        """One message, whatever their number."""
        before = jobs()
        done = run("srun", "--ntasks=2", *TRAIN, *TOY)
        assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
        assert [line for line in done.stderr.splitlines() if not line.startswith(("srun: ", "  "))] == [
            "cluster=slurm: this is rank 0 of 2 that srun started, and jobs are submitted by a process of its own; "
            "start it with plain python, or omit cluster and launcher to run on these ranks"
        ]
        assert len(jobs() - before) == 1  # the srun itself


def test_job_of_a_killed_submission_is_found_again(run, submit, jobs, tmp_path, slurm):
    """SIGKILL when SLURM has the first of two jobs and nobody has learned its id."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    real = shutil.which("sbatch")
    sbatch.write_text(f'#!/bin/sh\n{real} "$@"; [ "$1" = --test-only ] || kill -KILL $PPID\n')
    sbatch.chmod(0o755)
    before = jobs()
    words = (*HELLO, "cluster.nodes=1,2", "+cluster.extra.hold=true", "cluster.submit=detach", "hydra.sweep.dir=sweep")
    done = submit(*words, environ={**slurm, "PATH": f"{sbatch.parent}:{slurm['PATH']}"})
    assert done.returncode == -signal.SIGKILL
    (job,) = (line.split()[0] for line in jobs() - before)
    status = run(*PTDBENCH, "status", "sweep")
    rows = [line.split() for line in status.stdout.splitlines()[2:]]
    assert (rows[0][1], "PENDING" in rows[0]) == (job, True)
    assert all(store.load_record(tmp_path / "sweep" / f"{number}_hello_nodes-{number + 1}") for number in (0, 1))

    again = submit("sweep.resume=sweep")
    assert again.returncode == 0, again.stderr
    assert "1 run still in the queue, not submitted again: 0_hello_nodes-1" in again.stderr
    assert len(jobs() - before) == 2


@pytest.mark.thorough
def test_micro_batch_is_found_by_steps_on_both_nodes(submit, tmp_path):
    """Nothing cheaper has srun start ranks again and again within a job."""
    done = submit(*TOY, "cluster.nodes=2", "cluster.ranks_per_node=1", "train.micro_batch=max", timeout=400)
    assert done.returncode == 0, done.stderr
    (written,) = records(tmp_path)
    assert (written["status"], written["launcher"], written["nodes"]) == ("ok", "srun", ["n1", "n2"])
    assert written["layout"]["micro_batch"] == written["micro_batch"]["found"] == 8
    tries = [json.loads(path.read_text()) for path in sweep(tmp_path).glob("*/tries/*/record.json")]
    assert [(one["status"], one["nodes"]) for one in tries] == [("ok", ["n1", "n2"])] * 2
