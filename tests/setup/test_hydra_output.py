"""Hydra's files, against those that Hydra itself writes for the same command line."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ptdbench.problems import ConfigError
from ptdbench.records import store
from ptdbench.setup import hydra_output, resume, runs
from ptdbench.setup.compose import Source, compose_all
from tests.conftest import ROOT

#: A program of Hydra's own with the configurations of ptdbench.
PROGRAM = """
import hydra
import ptdbench.setup.config

hydra.main(version_base="1.3", config_path={conf!r}, config_name="config")(lambda config: None)()
"""


@pytest.fixture
def by_hydra(tmp_path, environ):
    def it(*words: str) -> Path:
        (tmp_path / "program.py").write_text(PROGRAM.format(conf=str(ROOT / "conf")))
        (tmp_path / "theirs").mkdir()
        done = subprocess.run(
            [sys.executable, tmp_path / "program.py", *words], cwd=tmp_path / "theirs", capture_output=True, text=True,
            env={**environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return tmp_path / "theirs"

    return it


def same(ours: Path, theirs: Path, *others: str) -> None:
    """Both folders have the same files of Hydra's, but for what lies elsewhere and what is meant to be ``others``."""
    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.yaml"))
    assert sorted(str(path.relative_to(ours)) for path in ours.rglob("*.yaml")) == names
    for name in names:
        one, other = (OmegaConf.to_container(OmegaConf.load(folder / name)) for folder in (ours, theirs))
        if "hydra" in one:
            for written in (one["hydra"], other["hydra"]):
                written["runtime"]["cwd"] = written["runtime"]["output_dir"] = None
                for option in ("run.dir", "sweep.dir", *others):
                    group, _, last = option.rpartition(".")
                    written[group].pop(last)
        assert one == other, name


def test_those_of_a_run(by_hydra, tmp_path):
    words = ["model=toy", "seed=3", "+hydra.job.env_set.FOO=1", "hydra.job.name=x", "hydra.run.dir=here"]
    theirs = by_hydra(*words)
    (run,) = runs.of(compose_all(words))
    hydra_output.write_files(run, tmp_path / "ours" / "here", None)
    assert run.environment == {"FOO": "1"}
    same(tmp_path / "ours", theirs)
    assert "seed: 3\n" in (tmp_path / "ours" / "here" / ".hydra" / "config.yaml").read_text()


def test_a_variable_may_refer_to_an_option():
    """With which Hydra itself fails."""
    (run,) = runs.of(compose_all(["model=toy", "seed=3", "+hydra.job.env_set.FOO='${data.seed}'"]))
    assert run.environment == {"FOO": "3"}


def test_those_of_a_sweep(by_hydra, tmp_path):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("defaults:\n  - toy\n  - _self_\nwidth: 128\n")
    places = ["hydra.sweep.dir=here", "hydra.sweep.subdir='${hydra.job.num}'"]  # which ours would name by more
    words, folder = ["model=toy,mine", "seed=3", *places], str(tmp_path / "own")
    theirs = by_hydra("-m", *words, "--config-dir", folder)
    source = Source(ROOT / "conf", extra=folder)
    composed, ours = compose_all(words, True, source), tmp_path / "ours" / "here"
    ours.mkdir(parents=True)
    for run in runs.of(composed):
        hydra_output.write_files(run, ours / run.subdirectory, ours)
    with source.open():
        hydra_output.write_multirun(composed.sweep(), ours)
    same(tmp_path / "ours", theirs)


def test_a_block_of_repeats_is_one_more_override():
    (whole,) = compose_all(["model=toy", "seed=3"]).wholes
    (typed,) = compose_all(["model=toy", "seed=3", "repeat.block=2"]).wholes
    assert runs.numbered(whole, 4, 2) == runs.numbered(typed, 4)


def test_without_a_folder_for_them_there_are_none(tmp_path):
    (run,) = runs.of(compose_all(["model=toy", "hydra.output_subdir=null"]))
    hydra_output.write_files(run, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_what_torchrun_starts_again_goes_on_where_it_was_and_other_results_are_left_alone(tmp_path, monkeypatch, kind):
    def claim(*others: str) -> Path:
        words = [*["model=toy", "seed=0,1"][: 1 + (kind == "sweep")], *others, f"hydra.{kind}.dir={tmp_path / 'here'}"]
        return hydra_output.claim(compose_all(words, kind == "sweep"), None)

    monkeypatch.setattr(store.fcntl, "flock", lambda *_: None)  # each process has ended before the next one
    begun = claim()
    with pytest.raises(ConfigError, match="it already holds results"):
        claim()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert claim() == begun
    with pytest.raises(ConfigError, match="it already holds results"):
        claim("train.steps=7")


def test_a_folder_of_runs_is_no_sweep_that_could_go_on(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "record.json").touch()
    with pytest.raises(ConfigError, match="it already holds results; give another directory"):
        hydra_output.claim(compose_all(["model=toy", f"hydra.run.dir={tmp_path}"]), None)


def test_a_home_directory_is_filled_in_and_one_with_pluses_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert hydra_output.claim(compose_all(["model=toy", "hydra.run.dir='~/run'"]), None) == Path.home() / "run"
    assert resume.read(["resume=~/run"], False, None).goes_on == Path.home() / "run"
    words = ["model=toy", f"++hydra.run.dir={tmp_path}/run"]
    hydra_output.claim(compose_all(words), None)
    rule = "another process is writing its results there; wait for it, or give another directory"
    with pytest.raises(ConfigError, match=rule):
        hydra_output.claim(compose_all(words), None)


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_sweep_is_not_carried_out_a_second_time_beside_the_first(tmp_path, monkeypatch, cluster):
    monkeypatch.chdir(tmp_path)
    words = [f"cluster={cluster}", "model=toy", "seed=0,1"]
    running = hydra_output.claim(compose_all(words, True), None)
    line = resume.read([f"sweep.resume={running}"], True, None)
    composed = compose_all(line.overrides, True)
    with pytest.raises(ConfigError, match="another process is writing its results there"):
        hydra_output.claim(composed, line.goes_on)
    store.unlock(running)  # as where all jobs have been submitted
    assert hydra_output.claim(composed, line.goes_on) == running
