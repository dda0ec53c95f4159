"""The script for those who have several GPUs, tried on two ranks of this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
import torch

from benchmarks import gpu_cluster
from benchmarks.gpu_cluster import Checks, launchers
from tests.conftest import ROOT

LOCAL = "local"


@pytest.fixture
def checks(tmp_path, monkeypatch) -> Checks:
    monkeypatch.setattr(gpu_cluster, "GONE", gpu_cluster.PATIENCE)  # a machine that is busy with other tests
    return Checks("cpu", "toy", batch=4, folder=tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["kill", "stop", "raise"])
def test_a_rank_that_fails_takes_its_run_along_and_is_named(checks, fault, capsys):
    (local,) = launchers([LOCAL], 2)
    checks.fault(local, fault)
    assert checks.failed == [], capsys.readouterr().out


@pytest.mark.ranks
def test_layouts_are_held_against_a_single_rank(checks, capsys):
    (local,) = launchers([LOCAL], 2)
    checks.layouts(local, ["ddp", "pdp", "hsdp"])
    said = capsys.readouterr().out
    assert checks.failed == [], said
    assert [line.split()[:3] for line in said.splitlines()] == [["ok", "local", "ddp"], ["ok", "local", "pdp"]]


def test_a_launcher_that_is_not_here_is_left_out(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(gpu_cluster.shutil, "which", lambda _: "/usr/bin/srun")
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
    environ, pipe = {**os.environ, gpu_cluster.MARK: mark}, subprocess.PIPE
    with subprocess.Popen(["sh", "-c", "echo; read _"], env=environ, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        process.stdout.readline()  # from here on it is the shell, and not yet on its way to become it
        assert gpu_cluster.living(mark) == [process.pid]
        process.kill()
    assert gpu_cluster.living(mark) == []


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs here")
def test_without_two_gpus_it_says_so_in_one_line():
    command = [sys.executable, "benchmarks/gpu_cluster.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-cluster needs two GPUs")
    assert done.stderr.count("\n") == 1
