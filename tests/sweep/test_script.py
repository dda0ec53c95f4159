"""The plain script for sbatch: its shape, its command, and what it refuses."""

import shlex
import sys
from unittest.mock import Mock

import pytest

from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.setup.compose import Source, compose_all, conf_folder
from ptdbench.setup.config import Cluster
from ptdbench.sweep import requests
from tests.conftest import ROOT
from tests.refusals import Abridged, refusal_of


@pytest.fixture(autouse=True)
def _without_slurm(monkeypatch):
    """On a laptop too: to be submitted elsewhere."""
    monkeypatch.setattr(slurm, "available", lambda: False)


def written(*overrides):
    text, _ = requests.write_script(["model=toy", "device=cpu", *overrides])
    return read(text)


def read(text):
    lines = text.splitlines()
    flags = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    return flags, shlex.split(lines[-1])


def test_the_command_asks_for_the_world_under_a_name_of_one_line():
    flags, command = written("parallel=fsdp", "cluster.nodes=2", "cluster.ranks_per_node=4", "cluster.cpus_per_rank=3")
    assert {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3"} <= set(flags)
    assert command == [
        "srun", "--kill-on-bad-exit=1", sys.executable, str(ROOT / "train.py"), "model=toy", "device=cpu",
        "parallel=fsdp", "cluster.nodes=2", "cluster.ranks_per_node=4", "cluster.cpus_per_rank=3",
    ]  # fmt: skip
    text, _ = requests.write_script(["model=toy", "device=cpu", "model.name='one\ntwo'"])
    assert "#SBATCH --job-name=ptdbench-one-two_ddp" in text.splitlines()
    assert "model.name='one\ntwo'" in shlex.split(text.partition("\nsrun")[2])


def test_lists_are_a_sweep_in_one_job_and_what_auto_came_to_is_stated():
    flags, command = written("parallel=ddp,fsdp")
    assert command[4:] == [
        "-m", "model=toy", "device=cpu", "parallel=ddp,fsdp", "cluster.nodes=1", "cluster.ranks_per_node=2",
    ]  # fmt: skip
    assert "--job-name=ptdbench-sweep" in flags
    _, command = written("parallel=glob(fs*)")  # if of one value
    assert command[4:6] == ["-m", "model=toy"]
    for words in (["repeat=auto", "parallel=ddp,fsdp"], ["hydra/sweeper=optuna", "seed=1,2"]):  # the first rank decides
        _, command = written(*words)
        assert command[4:-2] == ["-m", "model=toy", "device=cpu", *words]


@pytest.mark.parametrize(("overrides", "expected"), [
    (["cluster=site_modules", "cluster.time_minutes=5"], {"--account=my_project", "--time=5"}),
    (["+cluster.extra.nice=100"], {"--nice=100"}),
    (["++cluster.extra.nice=100"], {"--nice=100"}),
])  # fmt: skip
def test_sbatch_options_are_not_in_the_command(overrides, expected):
    flags, command = written(*overrides)
    assert expected <= set(flags)
    own = [word for word in command if word.lstrip("+")[:2] in ("cl", "hy") and word != "cluster=local"]
    assert own == ["cluster.nodes=1", "cluster.ranks_per_node=2"]


@pytest.mark.parametrize(("chosen", "flag", "first"), [
    ("defaults: [override /cluster: site_modules, _self_]", "--account=my_project", ["cluster=local"]),
    ("", "--job-name=ptdbench-toy_ddp", []),
])  # fmt: skip
def test_a_cluster_in_a_file_is_the_scripts_and_not_the_ranks(tmp_path, chosen, flag, first):
    """Where the ranks are told what is for jobs, they would submit some, or refuse it."""
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\n{chosen}\ncluster:\n  time_minutes: 5\n  nodes: 2\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    source = Source(conf_folder(), extra=str(tmp_path))
    script, _ = requests.write_script(["experiment=mine", "model=toy", "device=cpu"], source)
    flags, command = read(script)
    assert {flag, "--time=5", "--nodes=2"} <= set(flags)
    own = command[command.index(str(tmp_path)) + 1 :]
    assert own[: own.index("experiment=mine")] == first
    cluster = compose_all(own, source=source).configs[0].cluster
    assert (type(cluster), cluster.nodes, cluster.ranks_per_node) == (Cluster, 2, 2)


def test_a_typed_cluster_replaces_what_only_some_files_choose(tmp_path):
    (tmp_path / "experiment").mkdir()
    for name, text in (("plain", ""), ("on_slurm", "defaults: [override /cluster: slurm]\ncluster: {qos: null}")):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\nseed: 0\n")
    source = Source(conf_folder(), extra=str(tmp_path))
    words = ["experiment=plain,on_slurm", "model=toy", "device=cpu", "cluster=slurm"]
    _, command = read(requests.write_script(words, source)[0])
    composed = compose_all(command[command.index("cluster=local") :], multirun=True, source=source)
    assert [type(one.cluster) for one in composed.configs] == [Cluster, Cluster]


@pytest.mark.parametrize(("overrides", "line"), [
    (["cluster.nodes=1,2"], "cluster.nodes=1,2: one script is one job, and has one value; "
     "write one for each, or python train.py cluster=slurm"),
    (["seed=1,2", "parallel=single,ddp"],
     "parallel=single,ddp: one script is one job, …: 1 node x 1 rank, 1 node x 2 ranks; …"),
    (["cluster.time_minutes=5,10"], "cluster.time_minutes=5,10: one script is one job, …; write one for each, …"),
    (["cluster=local"], "cluster=local: is not a SLURM cluster; try slurm, or omit it"),
    (["train.micro_batch=max"], "train.micro_batch=max: is found by short runs, …; try … cluster=slurm, …"),
    (["sweep.resume=a"], "sweep.resume=a: continues as the jobs …; try python train.py sweep.resume=a"),
    (["cluster.requeue=true", "checkpoint.every_steps=5"], "cluster.requeue=true: …; try … cluster=slurm, …"),
    (["model=toyy"], "model=toyy: there is no such choice; try toy"),
])  # fmt: skip
def test_refused(overrides, line):
    assert refusal_of(written, *overrides) == Abridged(line)


def test_what_slurm_here_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, (2,))])
    flags, _ = written("device=auto", "parallel=ddp")
    assert "--gpus-per-node=2" in flags
    assert refusal_of(written, "cluster.partition=far").startswith("cluster.partition=far: there is no such partition")


class TestWithoutSlurm:
    """The script is for another machine."""

    @pytest.mark.parametrize("silent", [False, True], ids=["no slurm", "no answer"])
    def test_how_many_gpus_a_node_has_is_to_be_given(self, silent, monkeypatch):
        monkeypatch.setattr(slurm, "available", lambda: silent)
        monkeypatch.setattr(slurm, "partitions", Mock(side_effect=SlurmError("Unable to contact slurm controller")))
        line = "cluster.gpus_per_node=auto: … is not known here; give the number, or 0 for none"
        assert refusal_of(written, "device=auto", "parallel=ddp,fsdp") == Abridged(line)
        assert "--partition=far" in written("cluster.partition=far")[0]

    @pytest.mark.parametrize(("given", "ranks"), [
        ("gpus_per_node=4", 4), ("gres=gpu:volta:2", 2), ("gpus_per_node=0", 2),
    ])  # fmt: skip
    def test_what_is_given(self, given, ranks):
        assert f"cluster.ranks_per_node={ranks}" in written("device=auto", f"cluster.{given}")[1]
