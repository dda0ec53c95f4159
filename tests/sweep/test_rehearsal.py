"""What is said of a sweep before it is submitted, for each of its shapes."""

from __future__ import annotations

import pytest

from ptdbench.compose import compose_all
from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.problems import ConfigError
from ptdbench.sweep import rehearsal, requests
from tests.conftest import ROOT


@pytest.fixture
def asked(monkeypatch):
    """The questions to SLURM, which takes no job of two nodes."""
    questions = []

    def answer(flags):
        questions.append(flags)
        if flags["nodes"] == 2:
            raise SlurmError("Requested node configuration is not available")
        return f"Job 7 to start on {flags['nodes']} node"

    monkeypatch.setattr(slurm, "test", answer)
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, 4, 60, (0,), 4)])
    return questions


def runs(*overrides):
    words = ["cluster=slurm", "model=toy", "cluster.ranks_per_node=2", "train.global_batch=12", *overrides]
    found = compose_all(ROOT / "conf", "config", words, multirun=True)
    return requests.of_cluster(found.jobs, found.overrides)


def test_slurm_is_asked_once_for_each_shape(asked, capsys):
    assert rehearsal.show(runs("parallel=ddp,fsdp", "cluster.nodes=1,3")) == 0
    assert [flags["nodes"] for flags in asked] == [1, 3]
    assert capsys.readouterr().out.splitlines() == [
        "1 node x 2 ranks (2 jobs): Job 7 to start on 1 node",
        "3 nodes x 2 ranks (2 jobs): Job 7 to start on 3 node",
    ]


def test_what_slurm_is_asked_is_what_it_would_be_given(asked):
    rehearsal.show(runs("cluster.time_minutes=7", "cluster.cpus_per_rank=2", "+cluster.extra.nice=100"))
    (flags,) = asked
    told = (flags["nodes"], flags["ntasks_per_node"], flags["cpus_per_task"], flags["time"], flags["nice"])
    assert told == (1, 2, 2, 7, 100)


def test_a_shape_that_slurm_refuses_is_told_beside_those_that_it_takes(asked, capsys):
    assert rehearsal.show(runs("cluster.nodes=1,2")) == 1
    said = capsys.readouterr()
    assert said.out == "1 node x 2 ranks (1 job): Job 7 to start on 1 node\n"
    assert said.err == (
        "2 nodes x 2 ranks (1 job): SLURM would refuse it: Requested node configuration is not available\n"
    )


def test_a_run_that_is_refused_here_is_told_and_not_asked_about(asked, capsys):
    assert rehearsal.show(runs("train.global_batch=15,16")) == 1
    assert len(asked) == 1
    said = capsys.readouterr()
    assert said.err.startswith("toy_ddp: train.global_batch=15: must be a multiple of ")
    assert "(1 job)" in said.out


def test_before_a_submission_every_shape_must_be_accepted(asked):
    rehearsal.require_accepted(runs("cluster.nodes=1,3"))
    with pytest.raises(ConfigError) as caught:
        rehearsal.require_accepted(runs("cluster.nodes=1,2,3", "parallel=ddp,fsdp"))
    assert str(caught.value) == (
        "cluster=slurm: nothing was submitted, because SLURM refuses 2 nodes x 2 ranks: "
        "Requested node configuration is not available"
    )
