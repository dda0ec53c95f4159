"""The real command line: what it answers, with which exit status, and that refusals leave nothing behind.

Starting Python and torch costs seconds each time, so that refusals come from a fork of the tests' own process, and most
of what a command line may get wrong is tested in tests/setup.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ptdbench import entry
from ptdbench.launch import rendezvous
from ptdbench.records import failure, record, store
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import execution, requests
from ptdbench.sweep.execution import Agenda
from tests import forked
from tests.conftest import ROOT
from tests.ports import free_port
from tests.programs import TRAIN, call

TOY = ("model=toy", "train.steps=4", "device=cpu")


def refused(*arguments: str, cwd: Path) -> list[str]:
    done = forked.train_py(*arguments, cwd=cwd)
    assert done.returncode == 1
    assert done.stdout == ""
    assert list(cwd.iterdir()) == []  # no outputs/, no half of a run
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


class TestRefusals:
    def test_options_that_do_not_fit_and_misspelled_ones(self, tmp_path):
        found = refused(
            "backend=nccl", "device=cpu", "model.heads=3", "train.global_batch=17", "optimizer.lr=fast",
            "data.path=books", cwd=tmp_path,
        )  # fmt: skip
        assert [line.partition(":")[0] for line in found] == [
            "backend=nccl", "data.path=books", "model.heads=3", "optimizer.lr=fast", "train.global_batch=17",
        ]  # fmt: skip
        found = refused("parralel=ddp", "model=gpt_tyny", "train.stepz=3", cwd=tmp_path)
        assert ["try " in line for line in found] == [True] * 3
        line = "model=toyy: there is no such choice; try toy"
        for words in (["-m", "model=toy,toyy,gpt_tiny", "parallel=ddp,fsdp"], ["--help", "model=toyy"]):
            assert refused(*words, cwd=tmp_path) == [line]

    @pytest.mark.parametrize(
        "arguments",
        [["--foo"], ["--cfg"], ["--cfg", "nothing"], ["--experimental-rerun=x"], ["model=toy,gpt_tiny"]],
        ids=" ".join,
    )
    def test_flags_and_lists(self, arguments, tmp_path):
        assert len(refused(*arguments, cwd=tmp_path)) == 1

    def test_only_rank_0_of_a_launcher_speaks(self, tmp_path, environ, monkeypatch):
        # No torchrun ends rank 1 if a loaded machine forks it after rank 0 has gone.
        monkeypatch.setattr(rendezvous, "REFUSAL_SECONDS", 60.0)
        launch = {
            "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        ranks = [{**environ, **launch, "RANK": number, "LOCAL_RANK": number} for number in "01"]
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(forked.train_py, "model=toyy", cwd=tmp_path, environ=rank) for rank in ranks]
        assert [answer.result().returncode for answer in answers] == [1, 1]
        assert [answer.result().stderr for answer in answers] == ["model=toyy: there is no such choice; try toy\n", ""]
        shown = [forked.train_py("--cfg", "job", "--package", "seed", cwd=tmp_path, environ=rank) for rank in ranks]
        assert [answer.stdout for answer in shown] == ["0\n", ""]


class TestHelp:
    def test_help_lists_every_group_and_choice_and_imports_no_torch(self, tmp_path, monkeypatch):
        (tmp_path / "torch.py").write_text("raise ImportError('it would cost seconds')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        done = call(*TRAIN, "--help", "model=toy", "parallel=pdp", cwd=ROOT, environ=os.environ)
        assert (done.returncode, done.stderr) == (0, "")
        for group in (path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "hydra"):
            choices = ", ".join(sorted(path.stem for path in group.iterdir()))
            assert f"{group.name}: {choices}" in done.stdout
        for word in ("train.global_batch", "precision", "-m", "torchrun", "--cfg job"):
            assert word in done.stdout
        assert "hydra.cc" not in done.stdout  # written for a person, not by the framework

    def test_the_composed_config_can_be_read_and_has_nothing_of_the_framework(self, tmp_path):
        done = forked.train_py("model=toy", "parallel=pdp", "train.steps=7", "--cfg", "job", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "  steps: 7\n" in done.stdout
        assert "  schedule: 1f1b\n" in done.stdout
        assert "hydra" not in done.stdout
        done = forked.train_py("--cfg", "job", "parallel=fsdp", "--package", "parallel", cwd=tmp_path)  # one group
        assert (done.returncode, "reshard_after_forward: true" in done.stdout) == (0, True)
        assert "global_batch" not in done.stdout
        done = forked.train_py("model=toy", "--info", "defaults", "parallel=fsdp", cwd=tmp_path)
        assert (done.returncode, "parallel/fsdp" in done.stdout) == (0, True)
        done = forked.train_py("--hydra-help", "modle=x", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (1, "command line=--hydra-help modle=x: Could not override 'modle'.\n")
        assert list(tmp_path.iterdir()) == []

    def test_a_configuration_of_ones_own_lies_in_the_current_directory(self, tmp_path):
        shutil.copytree(ROOT / "conf", tmp_path / "own")
        (tmp_path / "own" / "model" / "mine.yaml").write_text("name: mine\n_target_: mine.Model\n")
        done = forked.train_py("--config-path", "own", "model=mine", "--cfg", "job", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "_target_: mine.Model" in done.stdout


@pytest.mark.ranks
class TestRuns:
    def test_a_model_without_reset_is_built_once_in_each_process_and_is_gone_from_the_one_that_waits(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        (tmp_path / "counted.py").write_text(COUNTED)
        custom = ("model=custom", "model._target_=counted.Model", "data.inputs=8", "data.outputs=8", "parallel=ddp")
        done = forked.with_ranks("-m", *custom, "device=cpu", "train.steps=1,2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        events = [tuple(line.split()) for line in (tmp_path / "events").read_text().splitlines()]
        parent = events[0][1]
        assert events[:4] == [("made", parent), ("gone", parent)] * 2  # the check of both runs
        ranks = [process for event, process in events[4:] if event == "made"]
        assert len(set(ranks)) == len(ranks) == 4
        assert parent not in {process for _, process in events[4:]}

    def test_a_workload_of_ones_own_is_one_module_and_one_yaml_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        (tmp_path / "guest.py").write_text(GUEST)
        (tmp_path / "conf" / "workload").mkdir(parents=True)
        (tmp_path / "conf" / "workload" / "guest.yaml").write_text(
            "name: guest\nlabel: guest\n_target_: guest.Guest\nanswer: 42\n"
        )
        done = forked.with_ranks("--config-dir", "conf", "workload=guest", "device=cpu", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith('{\n "ranks": 2,\n "answer": 42\n}\n')


def test_a_failed_run_of_a_launcher_is_resumed_by_that_launcher(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ptdbench.checkpoints.checkpoint_dir.latest_manifest", lambda directory: {})
    draft = record.begin(compose_all(["model=toy"], multirun=False).configs[0].resolved, tmp_path, {})
    failed = record.failed(draft, failure.describe(RuntimeError("a"), rank=0))
    store.write_record(tmp_path, failed | {"launcher": "openmpi"})
    entry._print_results(tmp_path, 1)
    assert f"resume       mpirun ... train.py resume={tmp_path}" in capsys.readouterr().out


def test_a_run_of_a_sweep_that_fails_says_so_at_once(tmp_path, monkeypatch, capsys):
    runs = requests.specified(compose_all(["model=toy", "device=cpu", "seed=1,2"], multirun=True), None)
    agenda = Agenda(tmp_path, runs)

    def fail(directory, *_):
        store.write_record(directory, record.failed(store.load_record(directory), failure.Failure(-1, "Lost", "gone")))

    monkeypatch.setattr("ptdbench.run.door.run", fail)
    execution.executor(agenda, compose_all(["model=toy"]))([agenda.open(1)])
    assert capsys.readouterr().err == "[2/2] toy ddp seed=2: failed: Lost: gone\n"


GUEST = """
from dataclasses import dataclass

from ptdbench.job import Outcome


@dataclass(frozen=True)
class Guest:
    answer: int
    trains = False

    def check(self, world_size, device_type, backend):
        pass

    def __call__(self, job):
        return Outcome({"guest": {"ranks": job.world.size, "answer": self.answer}})
"""

#: Notes when it is built and when it is freed, which its reference to itself leaves to the garbage collector.
COUNTED = """
import os
import weakref

from torch import nn


def note(event):
    with open(os.environ["EVENTS"], "a") as file:
        print(event, os.getpid(), file=file)


class Model(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.itself = [self]
        note("made")
        weakref.finalize(self, note, "gone").atexit = False
"""
