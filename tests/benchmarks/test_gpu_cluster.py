"""The script for those who have several GPUs, tried on two ranks of this machine's CPU."""

import subprocess
import uuid

import pytest

from benchmarks.gpu_check.session import Session, holders
from benchmarks.gpu_cluster import checks, processes
from benchmarks.gpu_cluster.checks import LAYOUTS, launchers
from ptdbench.setup.run_spec import specify
from tests.conftest import read
from tests.daily import cases


@pytest.fixture
def session(tmp_path, monkeypatch) -> Session:
    monkeypatch.setattr(checks, "GONE", checks.PATIENCE)  # a machine that is busy with other tests
    return Session("cpu", {}, tmp_path)


@pytest.fixture
def local():
    (launcher,) = launchers(["local"], 2)
    return launcher


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_rank_that_fails_takes_its_run_along_and_is_named(session, local, how):
    checks.fault(session, local, how)
    (check,) = session.checks
    assert check["passed"], check["said"]


@pytest.mark.thorough
@pytest.mark.ranks
def test_layouts_are_held_against_a_single_rank(session, local):
    rows = [(2, "parallel=ddp"), (2, "parallel=pdp"), (4, "parallel=hsdp"), (2, "parallel=ddp seed=1")]
    checks.layouts(session, local, rows, "gpt_tiny", 2)
    passed = {check["name"]: check["passed"] for check in session.checks}
    assert passed == {"local single": True, "local ddp": True, "local pdp": True, "local ddp seed=1": False}


@cases("ranks", [2, 4, 8, 16], daily=[2])
def test_all_layouts_are_legal_on_any_number_of_gpus(ranks):
    for layout in (layout for fewest, layout in LAYOUTS if fewest <= ranks):
        typed = ("model=gpt_small", f"train.global_batch={16 * ranks}", f"cluster.ranks_per_node={ranks}")
        specify(read(*typed, *layout.split()), None)


def test_a_launcher_that_is_not_here_is_left_out(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(checks.shutil, "which", lambda _: "/usr/bin/srun")
    assert [launcher.name for launcher in launchers(["local", "srun"], 2)] == ["local"]
    assert "srun" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    shown = [(launcher.name, launcher.ranks, launcher.nodes) for launcher in launchers(["local", "srun"], 8)]
    assert shown == [("local", 8, 1), ("srun", 16, 2)]


def test_processes_are_known_by_their_mark(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, mark)
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", "echo; read _"], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # from here on it is the shell, and not yet on its way to become it
        assert processes.here(mark) == [*holders(r"pipe:.*")] == [process.pid]
        assert holders() == {}
        process.kill()
    assert processes.here(mark) == []
