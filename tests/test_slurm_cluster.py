"""The test cluster is the SLURM that other tests take it for."""

import os
import signal
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.conftest import ROOT
from tests.programs import call, until


def said(environ: dict[str, str], *command: str) -> str:
    done = call(*command, cwd=ROOT, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_the_daemons_need_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(slurm_cluster, "_lacking", lambda packages: [])
    assert slurm_cluster.missing("chromium") == slurm_cluster.missing("openmpi-bin") == ""
    assert slurm_cluster.missing().startswith("only root may start its daemons")


def test_open_mpi_uses_both_nodes_of_an_allocation(slurm, mpirun):
    show = "echo $OMPI_COMM_WORLD_RANK $SLURMD_NODENAME"
    lines = said(slurm, "salloc", "-N2", "--ntasks-per-node=2", *mpirun, "bash", "-c", show).splitlines()
    assert sorted(lines) == ["0 n1", "1 n1", "2 n2", "3 n2"]


def test_jobs_of_one_session_are_canceled_alone(slurm):
    conf = Path(slurm["SLURM_CONF"])
    submit = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600")
    mine = said({**slurm, "SBATCH_WCKEY": "mine"}, *submit).strip()
    theirs = said(slurm, *submit).strip()
    slurm_cluster.cancel(conf, "mine")
    queue = said(slurm, "squeue", "--noheader", "--format=%i").split()
    assert theirs in queue
    assert mine not in queue


@pytest.mark.thorough
def test_second_cluster_starts_heals_and_ends(slurm, tmp_path_factory, request):
    """Beside the one of all tests."""
    beside = tmp_path_factory.mktemp("c")
    request.addfinalizer(lambda: slurm_cluster.down(beside))
    conf = slurm_cluster.up(beside)
    daemons = slurm_cluster.processes(beside)
    assert slurm_cluster.up(beside) == conf
    assert slurm_cluster.processes(beside) == daemons  # the running one was used

    os.kill(int((beside / "run" / "n2.pid").read_text()), signal.SIGKILL)
    until(lambda: slurm_cluster.node_states(beside) == {"n1": "idle", "n2": "dead"})
    slurm_cluster.up(beside)
    assert slurm_cluster.node_states(beside) == {"n1": "idle", "n2": "idle"}

    own = {**slurm, "SLURM_CONF": str(conf)}
    said(own, "sbatch", "-N2", "--output=/dev/null", "--wrap=srun sleep 600")
    until(lambda: said(own, "squeue", "--noheader", "--steps", "--format=%i").count(".0") == 1)
    before = slurm_cluster.processes(beside)
    slurm_cluster.down(beside)
    assert len(before) > len(daemons)
    assert slurm_cluster.processes(beside) == set()
    assert not beside.exists()
    assert str(beside) not in Path("/etc/hosts").read_text()
    assert said(slurm, "srun", "-N2", "hostname")  # the other one is as it was
