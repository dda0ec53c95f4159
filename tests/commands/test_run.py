"""``ptdbench run``: the runs of directories, carried out as they were composed."""

import json
import math
import os
import sys
from pathlib import Path

import msgspec
import pytest

from ptdbench import entry
from ptdbench.launch.world import World
from ptdbench.records import ownership, record, store
from ptdbench.run import ranks
from ptdbench.setup import config, hydra_interface, resume, runs
from ptdbench.setup.compose import compose_all
from tests.programs import call
from tests.refusals import refusal_of

RUN = ("model=toy", "device=cpu", "parallel=ddp", "train.steps=4", "train.clip_norm=inf", "profile.steps=0")


def begun(directory: Path, *overrides: str, **fields: object) -> Path:
    """A run whose process was killed as soon as its directory was there."""
    directory.mkdir()
    composed = compose_all([*RUN, *overrides], "cluster=slurm" in overrides)
    draft = record.begin(composed.configs[0].resolved, directory, {}, composed.typed)
    (run,) = runs.of(composed)
    store.write_record(directory, draft | {"variables": dict(run.environment)} | fields)
    hydra_interface.write_files(run, directory, None)
    return directory


def refused(directory: Path, world: World | None = None) -> str:
    return refusal_of(resume.startable, directory, world)


def test_target_that_may_run_any_code_needs_the_users_own_job(tmp_path, monkeypatch):
    directory = begun(tmp_path / "run", "model=custom", "model._target_=torch.hub.load")
    assert refused(directory).startswith(f"run={directory}: its record names torch.hub.load, which may run any code; ")
    monkeypatch.setenv("PTDBENCH_FOLDER", str(tmp_path))
    assert resume.startable(directory, None).call("model").target == "torch.hub.load"


@pytest.mark.ranks
class TestCarriedOut:
    def test_two_of_them_with_their_own_environment_and_what_json_has_no_number_for(self, tmp_path, environ):
        first = begun(tmp_path / "first", "+hydra.job.env_set.TORCH_NCCL_TRACE=7")
        second = begun(tmp_path / "second")
        command = (sys.executable, "-m", "ptdbench", "run", "first", "second")
        done = call(*command, cwd=tmp_path, environ=environ)
        assert done.returncode == 0, done.stderr
        records = [json.loads((path / "record.json").read_text()) for path in (first, second)]
        assert [(one["status"], one["steps"], one["world_size"]) for one in records] == [("ok", 4, 2)] * 2
        assert records[0]["overrides"] == [*RUN]
        assert records[0]["config"]["train"]["clip_norm"] == "inf"
        told = [one["environment"]["settings"].get("TORCH_NCCL_TRACE") for one in records]
        assert told == ["7", None]
        assert done.stdout.count("status\n") == 2  # a table of each

    @pytest.mark.thorough
    def test_as_ranks_of_torchrun(self, tmp_path, environ):
        run = begun(tmp_path / "run")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
        done = call(*torchrun, "-m", "ptdbench", "run", run, cwd=tmp_path, environ=environ)
        written = json.loads((run / "record.json").read_text())
        assert (done.returncode, written["status"]) == (1, "failed")
        assert written["error"]["message"].startswith(
            "train.global_batch=16: must be a multiple of the number of data-"
        )


def test_a_run_that_another_process_carries_out_does_not_keep_the_others_from_it(tmp_path, monkeypatch, capsys):
    held, other = begun(tmp_path / "held"), begun(tmp_path / "other")
    owner = msgspec.to_builtins(ownership.this_process("another", {}))
    store.write_record(held, store.load_record(held) | {"owner": owner})
    monkeypatch.setattr(entry, "prepare_ranks", lambda _: None)
    monkeypatch.setattr(ranks, "start", lambda _, attempt, *__: finish(attempt))
    assert entry.execute_runs([held, other]) == 1
    assert f"directory={held}: process {os.getpid()} on " in capsys.readouterr().err
    assert store.load_record(other)["status"] == "ok"


def test_a_run_that_is_named_twice_is_carried_out_once(tmp_path, monkeypatch):
    run, starts = begun(tmp_path / "run"), []
    monkeypatch.setattr(entry, "prepare_ranks", lambda _: None)
    monkeypatch.setattr(ranks, "start", lambda _, attempt, *__: starts.append(1) or finish(attempt))
    assert entry.execute_runs([run, run]) == 0
    assert len(starts) == 1


def finish(attempt: ownership.Attempt) -> None:
    """As its ranks would."""
    attempt.amend(lambda written: written | {"status": "ok", "steps": 4, "error": None})


def test_the_configuration_of_a_record_is_what_was_composed(tmp_path):
    words = ["optimizer.lr=1e-3", "train.clip_norm=inf", "+cluster.extra.nice=5", "cluster=slurm"]
    (asked,) = compose_all([*RUN, *words], multirun=True).configs
    written = store.load_record(begun(tmp_path / "run", *words))
    assert written["config"]["train"]["clip_norm"] == "inf"
    assert config.of_record(written).resolved == asked.resolved
    assert config.of_record(written).train.clip_norm == math.inf
    assert config.of_record(written).cluster == asked.cluster


class TestRefused:
    def test_directory_without_a_run_is_refused(self, tmp_path):
        told = "there is no run (no record.json); give the directory of a run below outputs"
        assert refused(tmp_path / "typo") == f"run={tmp_path / 'typo'}: {told}"
        file = begun(tmp_path / "run") / "record.json"
        assert refused(file) == f"run={file}: {told}"

    def test_a_sweep(self, tmp_path):
        (tmp_path / "sweep.json").touch()
        remedy = f"try python train.py sweep.resume={tmp_path}, or give the directory of one of its runs"
        assert refused(tmp_path) == f"run={tmp_path}: is a sweep; {remedy}"

    def test_complete_run_is_refused(self, tmp_path):
        run = begun(tmp_path / "run", status="ok", steps=4, error=None)
        again = f"python train.py resume={run} train.steps=8"
        assert refused(run) == f"run={run}: is complete, with 4 of 4 steps; try {again}, to train on from there"

    def test_run_of_a_job_is_refused(self, tmp_path):
        run = begun(tmp_path / "run", "cluster=slurm")
        rule = "cluster=slurm executes it as a job"
        assert refused(run) == f"run={run}: {rule}; try python train.py resume={run}"
        assert resume.startable(run, World(0, 2, 0, 2, "SLURM", nodes=1))

    def test_ranks_that_a_launcher_started_elsewhere(self, tmp_path):
        run = begun(tmp_path / "run", launcher="srun", nodes=["n1", "n2"])
        assert "its ranks were started by srun on n1, n2" in refused(run)
