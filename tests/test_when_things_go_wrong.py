"""What clusters and machines do to runs, done to real ones."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ptdbench.records.store import load_record
from tests.conftest import record_of
from tests.forked import Started, started
from tests.launch.patient import patient
from tests.programs import TRAIN, until

pytestmark = pytest.mark.ranks

LONG = ("model=toy", "device=cpu", "parallel=ddp", "train.steps=1000000", "train.max_minutes=null")
#: Not so long: half a minute, or until a file is gone.
PATIENT = ("parallel=ddp", "train.steps=300", "train.max_minutes=null")


def ranks_of(process: Started) -> dict[int, psutil.Process]:
    """The rank processes of a run, once both train: children of its fork server."""

    def both() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.ppid() != process.pid:
                    found.append(child)
        return found if len(found) == 2 else []

    return dict(enumerate(sorted(until(both), key=lambda child: child.pid)))


def lives(process: psutil.Process) -> bool:
    """Whether it is there, and not only the entry of one that has ended."""
    with suppress(psutil.NoSuchProcess):  # it may go between the two questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def progress_of(process: Started) -> None:
    until(lambda: "  step " in process.said()[1] or process.poll() is not None)
    assert process.poll() is None, process.said()


def test_stopped_rank_is_named_and_the_run_ends(tmp_path):
    """And while it runs, nobody but this machine can talk to its processes."""
    with started(*LONG, "timeout_minutes=0.1", "hydra.run.dir=run", cwd=tmp_path) as process:
        progress_of(process)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        listening = {c.laddr.ip for one in family for c in one.net_connections() if c.status == psutil.CONN_LISTEN}
        assert listening
        assert listening <= {"127.0.0.1", "::1"}
        children = ranks_of(process)
        children[1].send_signal(signal.SIGSTOP)
        assert process.communicate().returncode == 1
    record = record_of(tmp_path / "run")
    assert record["status"] == "timeout"
    rank = record["error"]["rank"]
    assert record["error"]["message"].startswith(f"rank {rank} has not finished step ")
    assert (tmp_path / "run" / "failures" / record["owner"]["launch"] / f"stacks-rank-{1 - rank}.txt").exists()
    assert not any(map(lives, children.values()))


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[Callable[[str], Path]]:
    path = tmp_path / "small"
    path.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a file system can be mounted by root only, and not everywhere")
        return path

    yield mount
    subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(1024))


@pytest.mark.parametrize(
    ("kind", "words", "size", "go_on"),
    [("run", (), "256k", "resume"), ("sweep", ("-m", "seed=0,1"), "512k", "sweep.resume")],
    ids=["run", "sweep"],
)
def test_full_disk_is_one_message_and_leaves_no_partial_file(tmp_path, tmpfs, kind, words, size, go_on):
    disk, waits = tmpfs(f"size={size}"), tmp_path / "waits"
    asked = (*words, *patient(waits, seconds=0.1), *PATIENT, f"hydra.{kind}.dir={disk}/{kind}")
    with started(*asked, cwd=tmp_path) as process:
        progress_of(process)
        fill(disk)
        waits.unlink()
        done = process.communicate()
    assert done.returncode == 1
    assert done.stderr.count("No space left on device") == 1, done.stderr
    assert f"free some space, and continue with python train.py {go_on}={disk.name}/{kind}" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for record in (disk / kind).glob("**/record.json"):
        assert load_record(record.parent)["error"]["type"] == "Unfinished"  # an older one, whole


def test_lost_node_is_a_row_with_that_reason(tmp_path, slurm):
    command = [
        *TRAIN, *LONG, "cluster=slurm", "cluster.nodes=2", "cluster.ranks_per_node=1",
        "hydra.sweep.dir=sweep",
    ]  # fmt: skip
    watching = subprocess.Popen(
        command, cwd=tmp_path, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: list(tmp_path.glob("sweep/0*/progress.json")))
        subprocess.run(
            ["scontrol", "update", "nodename=n2", "state=down", "reason=test"], env=slurm, timeout=30, check=True
        )
        output, errors = watching.communicate(timeout=240)
    finally:
        watching.kill()
        subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], env=slurm, timeout=30, check=False)
    assert watching.returncode == 1
    record = record_of(next(tmp_path.glob("sweep/0*")))
    assert record["status"] == "failed"
    assert record["error"]["type"] == "NODE_FAIL", errors
    assert "SLURM ended job" in output
