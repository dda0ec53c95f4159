"""The test cluster is the SLURM that other tests take it for."""

from pathlib import Path

from tests import slurm_cluster
from tests.conftest import ROOT
from tests.programs import call


def said(environ: dict[str, str], *command: str) -> str:
    done = call(*command, cwd=ROOT, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
