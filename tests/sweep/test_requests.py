"""The shape that each run of a sweep asks for, and what is refused before anything is submitted."""

from dataclasses import astuple
from unittest.mock import Mock

import pytest

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.launch.world import World
from ptdbench.problems import ConfigError
from ptdbench.records import ledger
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import requests
from tests.refusals import Abridged, refusal_of

#: Four nodes of eight GPUs by default, two without.
PARTITIONS = [Partition("gpu", is_default=True, gpus=(8,)), Partition("cpu", is_default=False, gpus=(0,))]

TOY = ("cluster=slurm", "model=toy", "train.global_batch=32")


@pytest.fixture(autouse=True)
def _slurm(monkeypatch):
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "partitions", lambda: PARTITIONS)


def asked(*overrides):
    found = compose_all([*TOY, *overrides], multirun=True)
    return requests.of_cluster(found)


def shapes(*overrides):
    return [astuple(request.shape) for request in asked(*overrides)]


class TestShape:
    def test_each_run_has_its_own(self):
        expected = [(1, 8, 8, None), (1, 1, 1, None), (2, 8, 8, None), (2, 1, 1, None)]
        assert shapes("cluster.nodes=1,2", "parallel=ddp,single") == expected

    @pytest.mark.parametrize(("overrides", "expected"), [
        ([], (1, 8, 8, None)),  # all GPUs of a node, and a rank for each
        (["cluster.partition=cpu", "cluster.cpus_per_rank=8"], (1, 2, 0, 8)),
        (["parallel=single", "device=cpu"], (1, 1, 0, None)),
        (["workload=hello", "parallel=single"], (1, 8, 8, None)),  # who says hello is not parallelized
    ])  # fmt: skip
    def test_what_auto_stands_for(self, overrides, expected):
        assert shapes(*overrides) == [expected]

    def test_it_does_not_depend_on_the_gpus_of_the_machine_that_submits(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        assert shapes() == [(1, 8, 8, None)]
        assert [request.refused for request in asked("cluster.ranks_per_node=8")] == [None]


class TestRefused:
    def test_one_run_is_refused_by_itself_and_where_none_can_run_the_command_line_with_all_reasons(self):
        sound, refused = asked("train.global_batch=16,17")
        assert (sound.refused, sound.shape) == (None, refused.shape)
        assert [problem.option for problem in refused.refused.problems] == ["train.global_batch"]
        with pytest.raises(ConfigError) as caught:
            asked("train.global_batch=15,17")
        found = [(problem.option, problem.value) for problem in caught.value.problems]
        assert found == [("train.global_batch", 15), ("train.global_batch", 17)]

    def test_what_the_cluster_has_not_refuses_the_whole_sweep_and_is_said_once(self):
        """A job that would wait for ever is no row of a table."""
        told = "cluster.partition=gpuu: there is no such partition; SLURM has gpu, cpu…"
        assert refusal_of(asked, "cluster.partition=gpuu", "parallel=ddp,fsdp") == Abridged(told)

    def test_a_silent_slurm_and_none(self, monkeypatch):
        monkeypatch.setattr(slurm, "partitions", Mock(side_effect=SlurmError("Unable to contact slurm controller")))
        assert refusal_of(asked) == "cluster=slurm: SLURM does not answer: Unable to contact slurm controller"
        monkeypatch.setattr(slurm, "available", lambda: False)
        told = "cluster=slurm: there is no sbatch on PATH; log in to a machine that submits jobs, or omit cluster to …"
        assert refusal_of(asked) == Abridged(told)


def test_on_this_machine_a_run_has_no_shape_and_the_world_must_be_the_one_that_is_asked_for():
    def of_machine(*overrides, world=None):
        return requests.specified(compose_all(["model=toy", "device=cpu", *overrides], multirun=True), world)

    assert [(request.shape, request.refused) for request in of_machine()] == [(None, None)]
    world = World(0, 4, 0, 2, "srun", nodes=2)
    wrong, right = of_machine("cluster.nodes=1,2", world=world)
    assert str(wrong.refused) == "cluster.nodes=1: srun started ranks on 2 nodes; try auto, 2"
    assert right.refused is None
    with pytest.raises(ConfigError, match=r"^cluster\.ranks_per_node=4: srun started 2 ranks on this node"):
        of_machine("cluster.ranks_per_node=4", world=world)


def test_a_run_that_goes_on_in_its_place_does_not_need_what_it_began_with_once_it_has_saved(tmp_path):
    composed = compose_all(["model=toy", "device=cpu", f"resume={tmp_path}/gone"], multirun=True)
    model = composed.configs[0].resolved["model"]
    with pytest.raises(ConfigError, match=r"/gone: holds no complete checkpoint"):
        requests.specified(composed, None, tmp_path)
    checkpoint_dir.begin(partial := checkpoint_dir.partial(tmp_path, 1))
    checkpoint_dir.write_manifest(partial, Manifest(1, 1, model, {}, {}, "", 0.0))
    checkpoint_dir.publish(partial)
    assert requests.specified(composed, None, tmp_path)[0].refused is None


def test_of_a_sweep_that_goes_on_only_runs_that_begin_need_what_it_began_with(tmp_path):
    ledger.begin(tmp_path, ["model=toy"])
    composed = compose_all([*TOY, f"resume={tmp_path}/gone"], multirun=True)
    assert requests.of_cluster(composed, tmp_path)[0].refused is None
    here = compose_all(["model=toy", "device=cpu", f"resume={tmp_path}/gone"], multirun=True)
    assert requests.specified(here, None, tmp_path)[0].refused is None


@pytest.mark.parametrize(("template", "name"), [
    ("${hydra.job.num}_${workload.label}", "0_toy_ddp"),
    ("run-${model.name}-${train.global_batch}", "run-toy-32"),
    ("${hydra.job.override_dirname}", "cluster=slurm,model=toy,train.global_batch=32"),
    ("plain", "plain"),
])  # fmt: skip
def test_the_directory_of_a_run_is_the_one_that_hydra_would_choose(template, name):
    (run,) = asked(f"hydra.sweep.subdir='{template}'")
    assert run.subdirectory == name
