"""Jobs that SLURM interrupts: saved, queued up again, and gone on with in the same directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import record_of
from tests.forked import train_py
from tests.launch.patient import patient
from tests.programs import call, until

RUN = (
    "cluster=slurm", "train.steps=1000", "train.max_minutes=null", "checkpoint.every_steps=100",
    "hydra.sweep.dir=sweep",
)  # fmt: skip
ALONE = ("cluster.ranks_per_node=1", "parallel=single")


def submitted(cwd: Path, env: dict[str, str], *options: str) -> tuple[str, Path]:
    """Submit a run; its job's id and its directory, once it has its first checkpoint.

    It takes its time for the other steps until :func:`hurry`.
    """
    done = train_py(*RUN, *patient(cwd / "waits"), "cluster.submit=detach", *options, cwd=cwd, environ=env)
    assert done.returncode == 0, done.stderr
    (job,) = json.loads((cwd / "sweep" / "sweep.json").read_text())["jobs"]
    directory = cwd / "sweep" / job["directory"]
    until(lambda: list(directory.glob("checkpoints/step-????????/manifest.json")))
    return job["id"], directory


def hurry(cwd: Path) -> None:
    (cwd / "waits").unlink()


def ask(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True).stdout


def test_signal_before_the_time_limit_requeues_and_resumes(tmp_path, slurm):
    job, directory = submitted(tmp_path, slurm, "cluster.requeue=true", "cluster.ranks_per_node=2")
    ask(slurm, "scancel", "--signal=USR2", job)
    until(lambda: ask(slurm, "squeue", "--noheader", "--format=%T", f"--jobs={job}").strip() == "PENDING")
    waiting = record_of(directory)
    assert "saved and requeued (1 of 10)" in waiting["error"]["message"]
    done = len(waiting["losses"])
    assert 100 <= done < 1000
    hurry(tmp_path)
    ask(slurm, "scontrol", "update", f"jobid={job}", "StartTime=now")  # SLURM would let it wait for two minutes
    finished = until(lambda: (found := record_of(directory))["status"] == "ok" and found)
    assert len(finished["losses"]) == 1000
    assert finished["losses"][:done] == waiting["losses"]
    assert [one["steps"] for one in finished["segments"]] == [done, 1000 - done]
    until((tmp_path / "sweep" / "results.jsonl").exists)
    status = call(sys.executable, "-m", "ptdbench", "status", "sweep", cwd=tmp_path, environ=slurm)
    assert status.returncode == 0, status.stdout
    assert " ok " in status.stdout


@pytest.mark.thorough
def test_last_requeue_stays_saved(tmp_path, slurm):
    job, directory = submitted(tmp_path, slurm, *ALONE, "cluster.requeue=true", "cluster.max_requeues=0")
    ask(slurm, "scancel", "--signal=USR2", job)
    stopped = until(lambda: (found := record_of(directory))["status"] == "timeout" and found)
    until(lambda: "not requeued: cluster.max_requeues=0 is reached" in record_of(directory)["error"]["message"])
    assert (directory / "checkpoints" / f"step-{len(stopped['losses']):08}" / "manifest.json").exists()


@pytest.mark.thorough
def test_canceled_job_saves_and_is_not_requeued(tmp_path, slurm):
    job, directory = submitted(tmp_path, slurm, *ALONE, "cluster.requeue=true")
    ask(slurm, "scancel", job)
    stopped = until(lambda: (found := record_of(directory))["status"] == "preempted" and found)
    assert stopped["error"]["message"].startswith("stopped by SIGTERM after step ")
    over = ("CANCELLED", "COMPLETED", "FAILED")
    until(lambda: ask(slurm, "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").strip() in over)

    assert f"it has saved: python train.py resume={directory}" in stopped["error"]["message"]
    hurry(tmp_path)
    again = train_py(f"resume={directory}", "cluster.time_minutes=5", cwd=tmp_path, environ=slurm)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("submitted 1 job: ")  # where the run was, and not on the login node
    finished = until(lambda: (found := record_of(directory))["status"] == "ok" and found)
    assert (len(finished["losses"]), finished["launcher"]) == (1000, "srun")
    assert finished["losses"][: len(stopped["losses"])] == stopped["losses"]
    assert finished["config"]["cluster"]["time_minutes"] == 5
