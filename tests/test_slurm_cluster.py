"""The test cluster is the SLURM that other tests take it for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.conftest import ROOT
from tests.programs import call, until


def run(environ: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return call(*command, cwd=ROOT, environ=environ)


def said(environ: dict[str, str], *command: str) -> str:
    """What a command prints that must succeed."""
    done = run(environ, *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-N3"], "PartitionNodeLimit"),
        (["--partition=short", "-N2"], "PartitionNodeLimit"),
        (["--partition=short", "--time=6"], "PartitionTimeLimit"),
    ],
)
def test_what_is_over_a_limit_waits_for_ever(slurm, options, reason):
    """As by SLURM's default: only who asks before submitting learns it."""
    job = said(slurm, "sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=true").strip()
    queued = ("squeue", "--noheader", f"--jobs={job}", "--format=%T %r")
    until(lambda: said(slurm, *queued).strip() == f"PENDING {reason}")


def test_partitions(slurm):
    lines = said(slurm, "sinfo", "--noheader", "--format=%P %l %D %N %G %c").splitlines()
    expected = ["debug* 1:00:00 2 n[1-2] gpu:2 4", "gpu infinite 2 n[1-2] gpu:2 4", "short 5:00 1 n1 gpu:2 4"]
    assert sorted(lines) == expected


def test_what_a_test_starts_knows_nothing_of_the_tests(slurm, mpirun):
    words = ("RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST", "OMP_NUM_THREADS")
    for launcher in (["srun"], [*mpirun, "-np", "1"]):
        names = {line.split("=")[0] for line in said(slurm, *launcher, "env").splitlines()}
        assert names.isdisjoint(words)
        assert "PATH" in names


def test_open_mpi_uses_both_nodes_of_an_allocation(slurm, mpirun):
    show = "echo $OMPI_COMM_WORLD_RANK $SLURMD_NODENAME"
    lines = said(slurm, "salloc", "-N2", "--ntasks-per-node=2", *mpirun, "bash", "-c", show).splitlines()
    assert sorted(lines) == ["0 n1", "1 n1", "2 n2", "3 n2"]


def test_the_jobs_of_one_session_end_and_those_of_others_stay(slurm):
    conf = Path(slurm["SLURM_CONF"])
    submit = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600")
    mine = said({**slurm, "SBATCH_WCKEY": "mine"}, *submit).strip()
    theirs = said(slurm, *submit).strip()
    slurm_cluster.cancel(conf, "mine")
    queue = said(slurm, "squeue", "--noheader", "--format=%i").split()
    assert theirs in queue
    assert mine not in queue


@pytest.fixture
def beside(slurm, tmp_path_factory):
    """A folder for a cluster of the test's own, beside the one of all tests."""
    folder = tmp_path_factory.mktemp("c")
    yield folder
    slurm_cluster.down(folder)


def test_a_cluster_of_its_own_from_start_to_end(slurm, beside):
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
    assert [pid for pid in before if slurm_cluster.program(pid)] == []
    assert not beside.exists()
    assert str(beside) not in Path("/etc/hosts").read_text()
    assert said(slurm, "srun", "-N2", "hostname")  # the other one is as it was


def test_a_folder_that_slurm_cannot_use_is_refused_and_what_is_in_it_stays(slurm, tmp_path):
    with pytest.raises(slurm_cluster.Unavailable, match="without spaces"):
        slurm_cluster.up(tmp_path / "a folder")
    (tmp_path / "mine").write_text("a person's")
    slurm_cluster.down(tmp_path)
    assert (tmp_path / "mine").read_text() == "a person's"


@pytest.mark.parametrize(
    ("user", "there", "packages", "reason"),
    [
        (0, [], [], "there is no slurm-wlm and no munge (Debian's names) here, and no apt-get to install it with"),
        (0, ["apt-get"], [], ""),
        (
            1000, ["apt-get"], ["openmpi-bin"],
            "there is no openmpi-bin (Debian's names) here, and only root may "
            "`apt-get install --no-install-recommends openmpi-bin`",
        ),
        (1000, ["mpirun"], ["openmpi-bin"], ""),
        (
            1000, [*slurm_cluster.PACKAGES["slurm-wlm"], *slurm_cluster.PACKAGES["munge"]], [],
            "only root may start its daemons (slurmctld, slurmd, munged)",
        ),
    ],
)  # fmt: skip
def test_why_it_cannot_be_had(monkeypatch, tmp_path, user, there, packages, reason):
    for command in there:
        (tmp_path / command).touch(mode=0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    monkeypatch.setattr(slurm_cluster, "_PATH", str(tmp_path))
    monkeypatch.setattr(slurm_cluster, "OF_CLUSTER", ("slurm-wlm", "munge"))
    assert slurm_cluster.missing(*packages) == reason


@pytest.fixture
def apt(monkeypatch, tmp_path):
    """Put in an apt-get of the test's own, as a shell script that keeps the folder and its list of calls."""

    def write(body: str) -> Path:
        script = tmp_path / "apt-get"
        script.write_text(f'#!/bin/sh\ncd {tmp_path}\nPATH=/usr/bin:/bin\necho "$*" >> calls\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(slurm_cluster, "_PATH", str(tmp_path))
        return tmp_path / "calls"

    return write


def test_what_is_missing_is_installed_once(apt):
    calls = apt('case "$*" in *install*) touch mpirun; chmod +x mpirun;; *) exit 100;; esac')
    slurm_cluster.install("openmpi-bin")
    update, install = calls.read_text().splitlines()
    assert update.endswith("update")
    assert install.endswith("install --no-install-recommends openmpi-bin")
    slurm_cluster.install("openmpi-bin")
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize("end", ["exit 100", "exit 0"])
def test_an_installation_that_fails_says_what_apt_said(apt, end):
    apt(f"echo E: Unable to locate package; {end}")
    with pytest.raises(slurm_cluster.Unavailable, match="install openmpi-bin` failed: E: Unable to locate package"):
        slurm_cluster.install("openmpi-bin")


@pytest.mark.thorough
def test_the_last_lines_tell_what_was_left_out(environ):
    script = (
        "import sys, pytest\n"
        "from tests import slurm_cluster\n"
        "slurm_cluster.missing = lambda *packages: 'none is wanted here'\n"
        "tests = ('test_slurm_cluster.py::test_partitions', 'test_launchers.py::TestTraining::test_mpirun')\n"
        "words = ['-p', 'no:cacheprovider', '-m', '', *('tests/' + test for test in tests)]\n"
        "sys.exit(pytest.main(words))\n"
    )
    done = run(environ, sys.executable, "-c", script)
    *_, first, why, test, second, other_why, other_test, end = done.stdout.splitlines()
    assert "left out 1 test, for want of SLURM" in first
    assert (why, test) == ("no SLURM: none is wanted here", "  tests/test_slurm_cluster.py::test_partitions")
    assert "left out 1 test, for want of Open MPI" in second
    assert other_why == "no Open MPI: none is wanted here"
    assert other_test == "  tests/test_launchers.py::TestTraining::test_mpirun"
    assert "2 skipped" in end
    assert done.returncode == 0
