"""The script for those who have several GPUs, tried on two ranks of this machine's CPU."""

import os
import subprocess
import uuid

import pytest

from benchmarks.gpu_cluster import checks as of_checks
from benchmarks.gpu_cluster import launchers as of_launchers
from benchmarks.gpu_cluster import processes
from benchmarks.gpu_cluster.checks import LAYOUTS, Checks, Layouts
from benchmarks.gpu_cluster.launchers import launchers, local
from ptdbench.setup.run_spec import specify
from tests.conftest import read
from tests.daily import cases


@pytest.fixture
def checks(tmp_path, monkeypatch) -> Checks:
    monkeypatch.setattr(of_checks, "GONE", of_checks.PATIENCE)  # a machine that is busy with other tests
    return Checks("cpu", "toy", batch=4, folder=tmp_path)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["kill", "stop", "raise"])
def test_a_rank_that_fails_takes_its_run_along_and_is_named(checks, fault, capsys):
    checks.fault(local(2), fault)
    assert checks.failed == [], capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.ranks
def test_layouts_are_held_against_a_single_rank(checks, capsys):
    other = Layouts(("parallel=ddp", "seed=1"))
    checks.layouts(local(2), [Layouts(("parallel=ddp,pdp",)), Layouts(("parallel=hsdp",), ranks=4), other])
    said = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert [one[0] for one in said] == ["ok", "ok", "FAIL"], said
    assert [one[2] for one in said] == ["ddp", "pdp", "ddp"]
    assert checks.failed == ["local ddp seed=1"]


@cases("ranks", [2, 4, 8, 16], daily=[2])
def test_all_layouts_are_legal_on_any_number_of_gpus(ranks):
    for layouts in (layouts for layouts in LAYOUTS if not layouts.on_gpus):
        for name in layouts.names if layouts.ranks <= ranks else []:
            typed = ("model=gpt_small", f"train.global_batch={16 * ranks}", f"cluster.ranks_per_node={ranks}")
            specify(read(*typed, *name.split()), None)


def test_a_launcher_that_is_not_here_is_left_out(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(of_launchers.shutil, "which", lambda _: "/usr/bin/srun")
    assert [one.name for one in launchers(["local", "srun"], 2)] == ["local"]
    assert "srun" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert [(one.name, one.ranks, one.nodes) for one in launchers(["local", "srun"], 8)] == [
        ("local", 8, 1),
        ("srun", 16, 2),
    ]


def test_processes_are_known_by_their_mark():
    mark = uuid.uuid4().hex
    environ, pipe = {**os.environ, processes.MARK: mark}, subprocess.PIPE
    with subprocess.Popen(["sh", "-c", "echo; read _"], env=environ, stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # from here on it is the shell, and not yet on its way to become it
        assert processes._here(mark) == [process.pid]
        process.kill()
    assert processes._here(mark) == []
