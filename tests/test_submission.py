"""Submissions that are refused, interrupted and killed, on a real SLURM: nobody's files are deleted, no job is unknown.

A stand-in for ``sbatch`` does what a test wants in the very moment of a submission, and passes all else on to SLURM's.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ptdbench.records import store
from tests.conftest import ROOT
from tests.forked import train_py
from tests.launch.patient import patient
from tests.programs import call, until

STATUS = (sys.executable, "-m", "ptdbench", "status")
#: Two shapes; the jobs stay in the queue.
HELD = (
    "cluster=slurm", "workload=hello", "device=cpu", "cluster.nodes=1,2", "+cluster.extra.hold=true",
    "cluster.submit=detach", "hydra.sweep.dir=sweep",
)  # fmt: skip

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sbatch(tmp_path: Path, slurm: dict[str, str]) -> Callable[[str], dict[str, str]]:
    """The environment in which ``sbatch``, unless it only tests, is a few shell commands; ``$REAL`` is SLURM's."""

    def make(body: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        script = folder / "sbatch"
        real = shutil.which("sbatch")
        script.write_text(f'#!/bin/sh\nREAL={real}\n[ "$1" = --test-only ] && exec $REAL "$@"\n{body}\n')
        script.chmod(0o755)
        return {**slurm, "PATH": f"{folder}:{slurm['PATH']}"}

    return make


@pytest.fixture
def run(tmp_path: Path, slurm: dict[str, str]) -> Run:
    return partial(call, cwd=tmp_path, environ=slurm)


@pytest.fixture
def submit(tmp_path: Path, slurm: dict[str, str]) -> Run:
    return partial(train_py, cwd=tmp_path, environ=slurm)


@pytest.fixture
def queued(run: Run, slurm: dict[str, str]) -> Callable[[], set[str]]:
    """The jobs of this session that wait or run."""

    def listed() -> set[str]:
        lines = run("squeue", "--noheader", "--array", "--format=%i %w").stdout.splitlines()
        return {line.split()[0] for line in lines if line.endswith(f" {slurm['SBATCH_WCKEY']}")}

    return listed


def errors(directory: Path) -> set[str]:
    return {record["error"]["type"] for record in store.read_results(directory)}


@pytest.mark.thorough
def test_a_refusal_deletes_nothing_of_a_users(run, submit, sbatch, queued, tmp_path):
    """The second of two shapes is refused after the rehearsal was accepted."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.txt").write_text("mine")
    environ = sbatch(
        f"if [ -e {tmp_path}/once ]; then echo 'sbatch: error: no more today' >&2; exit 1; fi\n"
        f'touch {tmp_path}/once; exec $REAL "$@"'
    )
    before = queued()
    done = submit(*HELD, environ=environ)
    assert (done.returncode, done.stdout) == (1, "")
    canceled, refused = done.stderr.splitlines()
    assert canceled.startswith("canceled what SLURM had taken already: ")
    assert refused == "cluster=slurm: nothing was submitted: no more today"
    assert queued() == before
    assert (tmp_path / "sweep" / "thesis.txt").read_text() == "mine"
    assert errors(tmp_path / "sweep") == {"NotSubmitted"}
    status = run(*STATUS, "sweep")
    assert status.returncode == 1
    assert status.stdout.count("NotSubmitted: nothing was submitted: no more today") == 2


def test_a_folder_for_output_that_cannot_be_made_is_refused_before_anything_is_written(submit, queued, tmp_path):
    (tmp_path / "file").write_text("in the way")
    before = queued()
    done = submit(*HELD, "cluster.log=file/%j")
    assert (done.returncode, done.stdout, queued()) == (1, "", before)
    assert done.stderr == (
        f"cluster.log=file/%j: {tmp_path / 'file'} is no folder; give a folder that the cluster's nodes share\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.thorough
def test_ctrl_c_in_the_middle_of_a_submission_leaves_no_job(submit, sbatch, queued, tmp_path):
    before = queued()
    done = submit(*HELD, environ=sbatch('kill -INT $PPID; exec $REAL "$@"'))
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.splitlines()[-1] == "stopped by SIGINT"
    assert queued() == before
    assert errors(tmp_path / "sweep") == {"NotSubmitted"}


def test_a_job_of_a_submission_that_was_killed_is_found_and_not_submitted_again(run, submit, sbatch, queued, tmp_path):
    """SIGKILL when SLURM has the first job and nobody has learned its id."""
    before = queued()
    done = submit(*HELD, environ=sbatch('$REAL "$@"; kill -KILL $PPID'))
    assert done.returncode == -signal.SIGKILL
    (job,) = queued() - before
    status = run(*STATUS, "sweep")
    rows = [line.split() for line in status.stdout.splitlines()[2:]]
    assert (rows[0][1], "PENDING" in rows[0]) == (job, True)
    assert all(json.loads((tmp_path / "sweep" / row / "record.json").read_text()) for row in ("0_hello", "1_hello"))

    again = submit("sweep.resume=sweep")
    assert again.returncode == 0, again.stderr
    assert "1 run still in the queue, not submitted again: 0_hello" in again.stderr
    assert len(queued() - before) == 2
    assert job in queued()


@pytest.mark.thorough
def test_a_record_that_is_moved_away_while_the_sweep_is_followed(run, slurm, tmp_path):
    waits = tmp_path / "waits"
    command = (
        "cluster=slurm", *patient(waits), "train.steps=1000", "train.max_minutes=null", "hydra.sweep.dir=sweep",
        "cluster.ranks_per_node=1", "parallel=single",
    )  # fmt: skip
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.txt").write_text("mine")
    train, pipe = [sys.executable, str(ROOT / "train.py"), *command], subprocess.PIPE
    process = subprocess.Popen(train, cwd=tmp_path, env=slurm, stdout=pipe, stderr=pipe, text=True)
    record = tmp_path / "sweep" / "0_Patient_single" / "record.json"
    until(record.with_name("progress.json").exists)
    record.rename(record.with_name("moved.json"))
    waits.unlink()
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "Traceback" not in said + errors
    assert json.loads(record.read_text())["status"] == "ok"
    assert (tmp_path / "sweep" / "thesis.txt").read_text() == "mine"
