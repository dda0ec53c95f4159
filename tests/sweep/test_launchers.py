"""The launchers, as far as they need no cluster: which jobs share an array, what a job inherits, one after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.plugins import Plugins

from ptdbench.launch import local, slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.problems import ConfigError
from ptdbench.records import ledger, store
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import launchers, requests, watch
from ptdbench.sweep.agenda import Agenda, NoObjective
from ptdbench.sweep.submission import arrays, script
from tests.conftest import ROOT


def of_cluster(*overrides):
    found = compose_all(["cluster=slurm", "model=toy", *overrides], multirun=True)
    return requests.of_cluster(found.jobs, found.overrides)


TEMPLATE = "${hydra.job.num}_${workload.label}"


class TestArrays:
    def test_jobs_of_one_shape_share_one_wherever_they_stand(self, asked):
        assert arrays(asked("cluster.nodes=1,2", "parallel=ddp,fsdp")) == [[[0], [1]], [[2], [3]]]
        assert arrays(asked("parallel=ddp,fsdp", "cluster.nodes=1,2")) == [[[0], [2]], [[1], [3]]]

    def test_a_shape_is_said_or_found(self, asked):
        assert arrays(asked("cluster.ranks_per_node=auto,2")) == [[[0], [1]]]  # two, where there is no GPU

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
    def test_what_is_told_otherwise_needs_another(self, asked, override):
        assert arrays(asked(override)) == [[[0]], [[1]]]


class TestSameNodes:
    """Runs that share a job."""

    def test_all_runs_are_one_job(self, asked):
        assert arrays(asked("parallel=ddp,fsdp,pdp", "sweep.same_nodes=true")) == [[[0, 1, 2]]]

    def test_a_job_for_each_block_of_repeats_and_an_array_of_those_with_as_many_runs(self, asked):
        runs = asked("parallel=ddp,fsdp", "sweep.same_nodes=true")
        blocks = [run.in_block(block) for block in range(3) for run in runs]
        assert arrays(blocks) == [[[0, 1], [2, 3], [4, 5]]]
        assert arrays(blocks[1:]) == [[[0]], [[1, 2], [3, 4]]]  # of a sweep that goes on

    def test_a_run_that_is_refused_is_in_none(self, asked):
        runs = asked("train.global_batch=16,15,8", "sweep.same_nodes=true")
        assert [run.refused is not None for run in runs] == [False, True, False]
        assert arrays(runs) == [[[0, 2]]]

    @pytest.mark.parametrize(
        ("overrides", "line"),
        [
            (
                ["cluster.nodes=1,2"],
                "cluster.nodes=1,2: with sweep.same_nodes=true all runs are in one job, which has one value; "
                "give one value, or start a sweep for each",
            ),
            (
                ["cluster.srun_args=[],[--label]"],
                "cluster.srun_args=[],['--label']: with sweep.same_nodes=true all runs are in one job, which has one "
                "value; give one value, or start a sweep for each",
            ),
            (
                ["parallel=single,ddp"],
                "sweep.same_nodes=true: one job has one shape, and these runs have several: 1 node x 1 rank with 0 "
                "GPUs a node, 1 node x 2 ranks with 0 GPUs a node; start a sweep for each",
            ),
            (
                ["parallel=ddp,fsdp", "cluster.requeue=true", "checkpoint.every_steps=5"],
                "cluster.requeue=true: with sweep.same_nodes=true a job has several runs, and would begin again with "
                "the first one; omit one of them, and sweep.resume goes on with what is missing",
            ),
        ],
    )
    def test_what_one_job_cannot_be(self, asked, overrides, line):
        with pytest.raises(ConfigError) as refused:
            arrays(asked(*overrides, "sweep.same_nodes=true"))
        assert line in str(refused.value).splitlines()

    def test_runs_that_ask_for_other_gpus(self, asked, monkeypatch):
        asked()
        monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, 4, 60, (2,), 4)])
        with pytest.raises(ConfigError, match="1 node x 2 ranks with 0 GPUs a node, 1 node x 2 ranks with 2 GPUs a n"):
            arrays(of_cluster("cluster.ranks_per_node=2", "device=cpu,cuda", "sweep.same_nodes=true"))

    def test_each_run_is_a_step_and_one_that_fails_ends_no_other(self, asked):
        (run, other) = asked("parallel=ddp,fsdp", "sweep.same_nodes=true")
        text = script([[run, other], [run, other]], "both", Path("/logs/%j"), {})
        steps = [line for line in text.splitlines() if line.startswith("srun ")]
        assert [line.split(" submitit.core._submit ")[1] for line in steps] == [
            f"/logs/%j/{number} || failed=$?" for number in range(2)
        ]
        assert [f" --output=/logs/%A_%a/{number}/%A_%a_%t_log.out " in line for number, line in enumerate(steps)] == [
            True,
            True,
        ]
        assert "#SBATCH --output=/logs/%A_%a/%A_%a_0_log.out\n" in text
        assert text.endswith("\nexit $failed\n")


class TestSubmission:
    """A SLURM that answers as a test wants; what is noted down when, and what is taken back."""

    @pytest.fixture
    def launch(self, asked, tmp_path, monkeypatch):
        canceled = []
        monkeypatch.setattr(slurm, "cancel_named", lambda names: canceled.extend(names) or ["101"])
        monkeypatch.setattr(launchers.SlurmLauncher, "_task", lambda self, environment: print)

        def it(answer, *overrides):
            monkeypatch.setattr(slurm, "submit", answer)
            runs = asked(*(overrides or ["cluster.nodes=1,2,4"]))
            agenda = Agenda(runs)
            jobs = [agenda.open(tmp_path, TEMPLATE, number, []) for number in range(len(runs))]
            launchers.SlurmLauncher(submitit_folder=str(tmp_path))._run(tmp_path, jobs)

        it.canceled = canceled
        return it

    def test_every_job_is_noted_down_before_and_after_it_is_submitted(self, launch, tmp_path):
        seen = []

        def answer(script):
            seen.append([job.id for job in ledger.read(tmp_path).jobs])
            return str(100 + len(seen))

        launch(answer)
        assert seen == [[None], ["101", None], ["101", "102", None]]
        noted = ledger.read(tmp_path).jobs
        assert [job.id for job in noted] == ["101", "102", "103"]
        assert len({job.name for job in noted}) == 3
        assert [(tmp_path / "logs" / id / f"{id}_submitted.pkl").exists() for id in ("101", "102", "103")] == [True] * 3
        assert launch.canceled == []

    def test_runs_that_share_a_job_are_each_noted_down_with_their_place_in_it(self, launch, tmp_path):
        launch(lambda script: "101", "parallel=ddp,fsdp", "sweep.same_nodes=true")
        noted = ledger.read(tmp_path).jobs
        assert [(job.id, job.element, job.step, job.directory) for job in noted] == [
            ("101", None, 0, "0_toy_ddp"),
            ("101", None, 1, "1_toy_fsdp"),
        ]
        for job in noted:
            assert Path(job.log) == tmp_path / "logs" / "101" / str(job.step)
            assert (Path(job.log) / "101_submitted.pkl").exists()

    def test_a_refusal_takes_back_what_was_submitted_and_says_so_in_the_records(self, launch, tmp_path, capsys):
        answers = iter(["101"])

        def answer(script):
            if found := next(answers, None):
                return found
            raise SlurmError("Job violates accounting/QOS policy")

        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(ConfigError, match="nothing was submitted: Job violates accounting/QOS policy"):
            launch(answer)
        assert launch.canceled == [f"ptdbench-toy_ddp-{name.rpartition('-')[2]}" for name in launch.canceled]
        assert len(launch.canceled) == 3  # by name: SLURM may have taken one without an answer
        assert "canceled what SLURM had taken already: 101" in capsys.readouterr().err
        rows = store.read_results(tmp_path)
        assert {row["error"]["type"] for row in rows} == {"NotSubmitted"}
        assert len(rows) == 3
        assert (tmp_path / "thesis.txt").read_text() == "mine"
        assert not list((tmp_path / "logs").glob("*.pkl"))

    def test_a_signal_in_the_middle_of_a_submission_waits_for_the_answer(self, launch, tmp_path):
        def answer(script):
            os.kill(os.getpid(), signal.SIGINT)
            return "101"

        with pytest.raises(local.Stopped):
            launch(answer)
        assert ledger.read(tmp_path).jobs[0].id == "101"
        assert len(launch.canceled) == 3


def test_jobs_of_a_search_are_waited_for_and_their_objectives_told(asked, tmp_path, monkeypatch):
    """Batch by batch: the numbers go on, and a job that fails raises when the sweeper asks for its result."""
    asked()  # a SLURM that answers
    submitted = []
    monkeypatch.setattr(slurm, "submit", lambda script: submitted.append(script) or str(100 + len(submitted)))
    monkeypatch.setattr(launchers.SlurmLauncher, "_task", lambda self, environment: print)
    monkeypatch.setattr(launchers.SlurmLauncher, "agenda", Agenda(searches=True))

    told = []

    def follow(sweep_directory, known):
        told.append(sorted(known))
        jobs = ledger.read(sweep_directory).jobs
        for job in jobs:
            directory = sweep_directory / job.directory
            written = store.load_record(directory)
            seed = written["config"]["seed"]
            done = {"status": "ok", "metrics": {"samples_per_second": 8.0 * seed}} if seed < 3 else {"error": None}
            store.write_record(directory, written | done)
        return {job.directory for job in jobs}

    monkeypatch.setattr(watch, "follow", follow)

    def compose(_, overrides):
        return compose_all(["cluster=slurm", "model=toy", *overrides], multirun=True).first

    launcher = launchers.SlurmLauncher(submitit_folder=str(tmp_path))
    launcher.config = compose(None, [f"hydra.sweep.dir={tmp_path}"])
    launcher.hydra_context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=compose))
    first = launcher.launch([["seed=1"], ["seed=2"]], 0)
    (second,) = launcher.launch([["seed=3"]], 2)
    assert [done.return_value for done in first] == [8.0, 16.0]
    with pytest.raises(NoObjective, match=r"^2_toy_ddp: failed, so that it has no throughput$"):
        _ = second.return_value
    assert [job.directory for job in ledger.read(tmp_path).jobs] == ["0_toy_ddp", "1_toy_ddp", "2_toy_ddp"]
    assert told == [[], ["0_toy_ddp", "1_toy_ddp"]]


def test_jobs_that_an_earlier_start_left_in_the_queue_are_waited_for_once(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(watch, "follow", lambda _, known: told.append(known) or {"0_toy_ddp"})
    monkeypatch.setattr(launchers.SlurmLauncher, "agenda", Agenda(queued=frozenset({"0_toy_ddp"}), searches=True))
    launcher = launchers.SlurmLauncher(submitit_folder=str(tmp_path))
    launcher._run(tmp_path, [])
    launcher._run(tmp_path, [])
    assert told == [set()]


def test_hydra_finds_these_under_the_names_of_the_plugins(monkeypatch):
    plugins = Plugins.instance()
    monkeypatch.setattr(plugins, "class_name_to_class", dict(plugins.class_name_to_class))
    launchers.install(Agenda())
    module = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
    assert plugins.class_name_to_class[f"{module}.SlurmLauncher"] is launchers.SlurmLauncher
    assert plugins.class_name_to_class[f"{module}.LocalLauncher"] is launchers.LocalLauncher
    basic = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    assert plugins.class_name_to_class[basic] is launchers.OneAfterTheOther


@pytest.mark.thorough
@pytest.mark.ranks
def test_jobs_on_this_machine_run_one_after_the_other_and_one_that_fails_ends_no_other(tmp_path, environ):
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "train.py"), "-m", "cluster=local", "hydra/launcher=submitit_local",
            "model=custom", "model._target_=tests.launch.faulty.Faulty", "data=synthetic_vectors", "data.inputs=8",
            "data.outputs=4", "train.steps=4", "device=cpu", "+model.how=raise,none", "hydra.sweep.dir=sweep",
        ],
        cwd=tmp_path, env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
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
    assert "0_Faulty_ddp, rank 1:\nTraceback" in done.stderr
    assert done.stdout.count("status\n") == 1  # one table
    told = [line for line in done.stderr.splitlines() if line.endswith((": started", ": failed", ": ok"))]
    assert told == ["0 Faulty_ddp: started", "0_Faulty_ddp: failed", "1 Faulty_ddp: started", "1_Faulty_ddp: ok"]
