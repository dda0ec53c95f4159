"""The launchers, as far as they need no cluster: which jobs share an array, what a job inherits, one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hydra.core.plugins import Plugins

from ptdbench.compose import compose_all
from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition
from ptdbench.sweep import launchers, requests
from tests.conftest import ROOT


@pytest.fixture
def jobs(monkeypatch):
    """The jobs of a command line, as a launcher gets them."""
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, 4, 60, (0,), 4)])

    def make(*overrides):
        found = compose_all(ROOT / "conf", "config", ["cluster=slurm", "model=toy", *overrides], multirun=True)
        asked = requests.of_cluster(found.jobs, found.overrides)
        return [launchers._Job(number, request, [], str(number)) for number, request in enumerate(asked)]

    return make


def arrays(jobs):
    """The numbers of the jobs of each array."""
    return [[job.number for job in array] for array in launchers._by_shape(jobs)]


class TestArrays:
    def test_jobs_of_one_shape_share_one_wherever_they_stand(self, jobs):
        assert arrays(jobs("cluster.nodes=1,2", "parallel=ddp,fsdp")) == [[0, 1], [2, 3]]
        assert arrays(jobs("parallel=ddp,fsdp", "cluster.nodes=1,2")) == [[0, 2], [1, 3]]

    def test_a_shape_is_said_or_found(self, jobs):
        assert arrays(jobs("cluster.ranks_per_node=auto,2")) == [[0, 1]]  # two, where there is no GPU

    @pytest.mark.parametrize(
        "override",
        [
            "cluster.time_minutes=5,10",
            "cluster.cpus_per_rank=1,2",
            "cluster.setup=[],[umask]",
            "cluster.srun_args=[],[--label]",
            "cluster.log=null,logs/%j",
            "+cluster.extra.nice=1,2",
        ],
    )
    def test_what_is_told_otherwise_needs_another(self, jobs, override):
        assert arrays(jobs(override)) == [[0], [1]]


class TestEnvironment:
    def test_a_job_learns_nothing_of_the_job_that_submits_it(self, monkeypatch):
        """From a shell on a node: its step's and its launcher's variables describe a job that the new one is not."""
        for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_ID", "SBATCH_PARTITION"):
            monkeypatch.setenv(name, "stale")
        for name in ("SLURM_CONF", "SLURM_CLUSTERS", "MY_OWN"):
            monkeypatch.setenv(name, "mine")
        with launchers._own_environment():
            inherited = dict(os.environ)
        assert {name for name, value in inherited.items() if value == "mine"} == {
            "SLURM_CONF", "SLURM_CLUSTERS", "MY_OWN",
        }  # fmt: skip
        assert not {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_ID"} & inherited.keys()
        assert os.environ["SLURM_JOB_ID"] == "stale"  # and the submitting process keeps its own


def test_hydra_finds_these_under_the_names_of_the_plugins(monkeypatch):
    plugins = Plugins.instance()
    monkeypatch.setattr(plugins, "class_name_to_class", dict(plugins.class_name_to_class))
    launchers.install([])
    module = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
    assert plugins.class_name_to_class[f"{module}.SlurmLauncher"] is launchers.SlurmLauncher
    assert plugins.class_name_to_class[f"{module}.LocalLauncher"] is launchers.LocalLauncher


@pytest.mark.ranks
def test_jobs_on_this_machine_run_one_after_the_other_and_one_that_fails_ends_no_other(tmp_path, environ):
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "train.py"), "-m", "cluster=local", "hydra/launcher=submitit_local",
            "model=custom", "model._target_=tests.launch.faulty.Faulty", "data=synthetic_vectors", "data.inputs=8",
            "data.outputs=4", "train.steps=4", "device=cpu", "+model.how=raise,none", "hydra.sweep.dir=sweep",
        ],
        cwd=tmp_path, env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    records = [json.loads(line) for line in (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()]
    assert [(record["status"], record["launcher"], record["world_size"]) for record in records] == [
        ("failed", "local", 2),
        ("ok", "local", 2),
    ]
    assert (records[0]["error"]["rank"], records[0]["error"]["message"]) == (1, "this one is on purpose")
    assert records[0]["started"] < records[1]["started"]
    assert "0_custom_ddp, rank 1:\nTraceback" in done.stderr
    assert done.stdout.count("status\n") == 1  # one table
    told = [line for line in done.stderr.splitlines() if line.endswith((": started", ": failed", ": ok"))]
    assert told == ["0 custom_ddp: started", "0_custom_ddp: failed", "1 custom_ddp: started", "1_custom_ddp: ok"]
