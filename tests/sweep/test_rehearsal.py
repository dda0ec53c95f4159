"""What is asked of SLURM before anything is submitted, and what is said of its answers."""

from __future__ import annotations

import pytest

from ptdbench.launch import slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.problems import ConfigError
from ptdbench.sweep import rehearsal


@pytest.fixture
def scripts(monkeypatch):
    """The scripts that SLURM was asked about; it would take them."""
    found = []
    monkeypatch.setattr(slurm, "test", lambda script: found.append(script) or "Job 5 to start at noon")
    return found


def test_a_line_for_each_array_of_jobs(asked, scripts, capsys):
    assert rehearsal.show(asked("cluster.nodes=1,2", "seed=0,1,2"), {}) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 node x 2 ranks (3 jobs): Job 5 to start at noon",
        "2 nodes x 2 ranks (3 jobs): Job 5 to start at noon",
    ]
    assert ["#SBATCH --array=0-2%" in script for script in scripts] == [True, True]


def test_runs_that_share_a_job_are_counted(asked, scripts, capsys):
    assert rehearsal.show(asked("parallel=ddp,fsdp", "sweep.same_nodes=true"), {}) == 0
    assert capsys.readouterr().out == "1 node x 2 ranks (1 job of 2 runs): Job 5 to start at noon\n"
    assert scripts[0].count("\nsrun ") == 2


def test_what_slurm_would_refuse_and_what_is_refused_before(asked, monkeypatch, capsys):
    def refuse(script):
        raise SlurmError("Invalid account")

    monkeypatch.setattr(slurm, "test", refuse)
    runs = asked("train.global_batch=16,15")
    assert rehearsal.show(runs, {}) == 1
    out, err = capsys.readouterr()
    refused, would_be = err.splitlines()
    assert "train.global_batch=15: must be a multiple of " in refused
    assert (out, would_be) == ("", "1 node x 2 ranks (1 job): SLURM would refuse it: Invalid account")
    with pytest.raises(ConfigError, match="nothing was submitted, because SLURM refuses 1 node x 2 ranks: Invalid acc"):
        rehearsal.require_accepted(runs, {})
