"""A job that SLURM interrupts: saved, queued up again, and gone on with in the same directory."""

import json
import subprocess
import sys

from ptdbench.records import store
from tests.conftest import record_of
from tests.forked import train_py
from tests.launch.patient import patient
from tests.programs import call, until

RUN = (
    "cluster=slurm", "cluster.submit=detach", "cluster.requeue=true", "cluster.ranks_per_node=2", "train.steps=1000",
    "train.max_minutes=null", "checkpoint.every_steps=100", "hydra.sweep.dir=sweep",
)  # fmt: skip


def test_signal_before_the_time_limit_requeues_and_resumes(tmp_path, slurm):
    def ask(*command: str) -> str:
        return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=240, check=True).stdout

    waits = tmp_path / "waits"
    done = train_py(*RUN, *patient(waits), cwd=tmp_path, environ=slurm)
    assert done.returncode == 0, done.stderr
    (submitted,) = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    job, directory = submitted["id"], tmp_path / "sweep" / submitted["directory"]
    until(lambda: list(directory.glob("checkpoints/step-????????/manifest.json")))
    ask("scancel", "--signal=USR2", job)
    until(lambda: ask("squeue", "--noheader", "--format=%T", f"--jobs={job}").strip() == "PENDING")
    waiting = record_of(directory)
    assert "saved and requeued (1 of 10)" in waiting["error"]["message"]
    taken = len(waiting["losses"])
    assert 100 <= taken < 1000
    waits.unlink()
    ask("scontrol", "update", f"jobid={job}", "StartTime=now")  # SLURM would let it wait for two minutes
    until(lambda: store.load_record(directory)["status"] == "ok")
    finished = record_of(directory)
    assert len(finished["losses"]) == 1000
    assert finished["losses"][:taken] == waiting["losses"]
    assert [one["steps"] for one in finished["segments"]] == [taken, 1000 - taken]
    status = call(sys.executable, "-m", "ptdbench", "status", "sweep", cwd=tmp_path, environ=slurm)
    assert status.returncode == 0, status.stdout
    assert " ok " in status.stdout
