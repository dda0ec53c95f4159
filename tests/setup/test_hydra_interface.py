"""Hydra's own options: what is refused since it would do nothing here; its files, against those that Hydra writes."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ptdbench.launch.world import World
from ptdbench.planning import plans
from ptdbench.problems import ConfigError
from ptdbench.records import store
from ptdbench.setup import hydra_interface, resume, runs
from ptdbench.setup.compose import Source, compose_all
from tests.conftest import ROOT
from tests.refusals import Abridged, refusal_of

CONF = ROOT / "conf"


def refused(*overrides: str, world: World | None = None, goes_on: Path | None = None) -> str:
    composed = compose_all(["model=toy", *overrides])
    return refusal_of(hydra_interface.check, composed, world, goes_on)


#: What is typed and would do nothing, and the whole answer.
TOLD = {
    "hydra.job.chdir=true": "hydra.job.chdir=true: runs start in the current directory; omit it",
    "hydra.verbose=true": "hydra.verbose=true: nothing is logged through Hydra; omit it",
    "hydra/job_logging=default": "hydra.job_logging={...}: nothing is logged through Hydra; omit it",
    "hydra/hydra_logging=default": "hydra.hydra_logging={...}: nothing is logged through Hydra; omit it",
    "+hydra.callbacks.mine={_target_:my.Callback}": "hydra.callbacks={...}: … they would never be called; omit it",
    "hydra.sweep.dir=x": "hydra.sweep.dir=x: is for sweeps, and this is a single run; try hydra.run.dir=x",
    "hydra/launcher=ptdbench": "hydra/launcher=ptdbench: …; try cluster=slurm, or basic for this machine",
    "hydra/launcher=submitit_local": "hydra/launcher=submitit_local: does not go with cluster=local; try … basic …",
    "cluster=slurm hydra/launcher=basic": "hydra/launcher=basic: does not go with cluster=slurm; omit it",
    "cluster=env": "cluster=env: every rank looks for this very word; type it, or set PTDBENCH_ENV=1 for all ranks",
    "hydra.mode=MULTIRUN hydra/launcher=submitit_slurm": "hydra/launcher=submitit_slurm: …; try cluster=slurm, …",
}


@pytest.mark.parametrize("typed", TOLD)
def test_what_would_do_nothing(typed):
    assert refused(*typed.split()) == Abridged(TOLD[typed])


def test_variables_of_a_launcher_beside_torchrun():
    told = "cluster=env: is for ranks without another launcher, and torchrun started this one; omit it"
    assert refused("cluster=env", world=World(0, 2, 0, 2, "torchrun")) == told


def test_directories_of_runs_and_sweeps_and_defaults_that_are_typed():
    told = "hydra.run.dir=x: is for single runs, and this is a sweep; try hydra.sweep.dir=x"
    assert refused("hydra.run.dir=x", "hydra.mode=MULTIRUN") == told
    composed = compose_all(["model=toy", "hydra.run.dir=x", "hydra.mode=MULTIRUN"])
    hydra_interface.check(composed, None, Path("x"))  # a sweep begun so goes on
    composed = compose_all(["model=toy", "hydra.job.chdir=false", "hydra.verbose=false", "hydra/job_logging=none"])
    hydra_interface.check(composed, None, None)


class TestResourcesOfJobs:
    RULE = "the resources of a job are set in the group cluster only"

    @pytest.mark.parametrize(("typed", "remedy"), [
        ("partition=short", "try cluster.partition=short"),
        ("'setup=[a b]'", "try 'cluster.setup=[a b]'"),
        ("name=mine", "see"),
        ("timeout_min=60", "see python train.py cluster=slurm --cfg job --package cluster"),
    ])  # fmt: skip
    def test_are_refused_with_what_to_type(self, typed, remedy):
        (typed,) = shlex.split(typed)
        told = refused("cluster=slurm", f"hydra.launcher.{typed}")
        assert told.startswith(f"hydra.launcher.{typed}: {self.RULE}; {remedy}")

    def test_in_a_file_as_typed(self, tmp_path):
        text = "hydra: {launcher: {partition: short, array_parallelism: 2, timeout_min: 3}}\n"
        (tmp_path / "experiment").mkdir()
        head = "# @package _global_\ndefaults: [override /hydra/launcher: submitit_slurm]\n"
        (tmp_path / "experiment" / "mine.yaml").write_text(head + text)
        words = ["model=toy", "experiment=mine", "cluster=slurm"]
        composed = compose_all(words, source=Source(CONF, extra=str(tmp_path)))
        found = refusal_of(hydra_interface.check, composed, None, None).splitlines()
        refusal = [Abridged(f"{self.RULE}; see …"), f"{self.RULE}; try cluster.partition=short"]
        assert [problem.partition(": ")[2] for problem in found] == refusal


def test_runs_of_a_sweep_have_directories_of_their_own():
    rule = "hydra.sweep.subdir=${model.name}: runs 0, 1 would have the same directory; add ${hydra.job.num} to it"
    assert refused("seed=1,2", "hydra.sweep.subdir='${model.name}'", "hydra.mode=MULTIRUN") == rule
    rule = "hydra.sweep.subdir=s${seed}: runs 0, 3 would have the same directory; add ${hydra.job.num} to it"
    assert refused("seed=1,2", "repeat=2", "hydra.sweep.subdir='s${seed}'", "hydra.mode=MULTIRUN") == rule
    for own in ("'s${seed}'", "${model.name}_${hydra.job.num}"):
        composed = compose_all(["model=toy", "seed=1,2", f"hydra.sweep.subdir={own}"], True)
        hydra_interface.check(composed, None, None)
        assert composed.hydras[0] == f"hydra.sweep.subdir={own}"
    own = "hydra.sweep.subdir='s${seed}_${repeat.block}'"
    hydra_interface.check(compose_all(["seed=1,2", "repeat=2", own], True), None, None)


@pytest.mark.parametrize("place", [".", "../elsewhere/0", "/elsewhere/0", "a/../.."])
def test_runs_of_a_sweep_lie_below_it(place):
    rule = "is not below the directory of the sweep; give a directory below it, or another hydra.sweep.dir"
    assert refused(f"hydra.sweep.subdir={place}", "hydra.mode=MULTIRUN") == f"hydra.sweep.subdir={place}: {rule}"


@pytest.mark.parametrize(("typed", "told"), [
    ("hydra.run.dir=${hydra:job.name}", "hydra.run.dir=${hydra:job.name}: … (HydraConfig was not set)"),
    ("model.name=${nope}", "hydra.run.dir=…: … (Interpolation key 'nope' not found)"),
    ("hydra.run.dir=x/${nope}", "hydra.run.dir=x/${nope}: … (Interpolation key 'nope' not found)"),
    ("+hydra.job.env_set.A=${oc.env:NOPE}", "hydra.job.env_set.A=${oc.env:NOPE}: … (…'NOPE' not found…)"),
])  # fmt: skip
def test_what_the_directory_and_the_environment_refer_to_has_a_value(typed, told):
    assert refused(typed) == Abridged(f"{told}; give the value itself")
    assert refused("~model.name") == "model=toy: its file gives it no name; add the line name: toy"


def test_a_directory_that_is_not_used_may_refer_to_nothing():
    hydra_interface.check(compose_all(["model=toy", "hydra.sweep.dir=x/${nope}"]), None, Path("x"))
    plans.composed(["model=toy", "hydra.run.dir=x/${nope}"], None)  # a plan has the directory of a sweep
    with pytest.raises(ConfigError, match="give the value itself"):
        plans.composed(["model=toy", "model.name=${nope}"], None)


class TestSearch:
    WORDS = ("hydra/sweeper=optuna", "hydra.mode=MULTIRUN", "seed=1,2")

    @pytest.mark.parametrize(("words", "said"), [
        ("cluster=slurm cluster.submit=detach", "…of its jobs before it can choose the next ones; try wait"),
        ("cluster=slurm sweep.same_nodes=true",
         "sweep.same_nodes=true: hydra/sweeper=optuna … by earlier results, … at once; omit it"),
        ("hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0: must be at least 1"),
        ("virtual=h100", "virtual=h100: … takes no time, so hydra/sweeper=optuna …; omit hydra/sweeper=optuna, or …"),
    ])  # fmt: skip
    def test_results_that_come_too_late_or_tell_nothing(self, words, said):
        assert refused(*self.WORDS, *words.split()) == Abridged(said)

    def test_one_that_goes_on_and_would_draw_other_values(self, tmp_path):
        told = "…drawn without a seed, …; start another sweep; one that can be resumed sets hydra.sweeper.sampler.seed"
        assert refused(*self.WORDS, goes_on=tmp_path) == Abridged(told)

    @pytest.mark.parametrize(("typed", "file", "direction", "rate"), [
        ("", "", "maximize", 1.0),
        ("hydra.sweeper.direction=minimize", "", "minimize", 1.0),
        ("objective=held_out_loss eval.every=1", "", "minimize", 1.0),
        ("experiment=mine", "direction: minimize", "minimize", 1.0),
        ("experiment=mine", "max_failure_rate: 0.0", "maximize", 0.0),
    ])  # fmt: skip
    def test_what_a_sweeper_is_set_to(self, tmp_path, typed, file, direction, rate):
        """Also to what is a default of the plugin."""
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nhydra: {{sweeper: {{{file}}}}}\n")
        source = Source(CONF, extra=str(tmp_path))
        composed = compose_all(["model=toy", *self.WORDS, *typed.split()], source=source)
        with source.open():  # what the sweeper is made of
            sweeper = composed.sweep().hydra.sweeper
        assert (sweeper.direction, sweeper.max_failure_rate) == (direction, rate)


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
    hydra_interface.write_files(run, tmp_path / "ours" / "here", None)
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
        hydra_interface.write_files(run, ours / run.subdirectory, ours)
    with source.open():
        hydra_interface.write_multirun(composed.sweep(), ours)
    same(tmp_path / "ours", theirs)


def test_a_block_of_repeats_is_one_more_override():
    (whole,) = compose_all(["model=toy", "seed=3"]).wholes
    (typed,) = compose_all(["model=toy", "seed=3", "repeat.block=2"]).wholes
    repeat, same = runs.numbered(whole, 4, 2), runs.numbered(typed, 4)
    assert (repeat.repeat, repeat.hydra.overrides) == (same.repeat, same.hydra.overrides)
    assert repeat.hydra.job.num == same.hydra.job.num == 4


def test_without_a_folder_for_them_there_are_none(tmp_path):
    (run,) = runs.of(compose_all(["model=toy", "hydra.output_subdir=null"]))
    hydra_interface.write_files(run, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_what_torchrun_starts_again_goes_on_where_it_was_and_other_results_are_left_alone(tmp_path, monkeypatch, kind):
    def claim(*others: str) -> Path:
        words = [*["model=toy", "seed=0,1"][: 1 + (kind == "sweep")], *others, f"hydra.{kind}.dir={tmp_path / 'here'}"]
        return hydra_interface.claim(compose_all(words, kind == "sweep"), None)

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
        hydra_interface.claim(compose_all(["model=toy", f"hydra.run.dir={tmp_path}"]), None)


def test_a_home_directory_is_filled_in_and_one_with_pluses_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert hydra_interface.claim(compose_all(["model=toy", "hydra.run.dir='~/run'"]), None) == Path.home() / "run"
    assert resume.read(["resume=~/run"], False, None).goes_on == Path.home() / "run"
    words = ["model=toy", f"++hydra.run.dir={tmp_path}/run"]
    hydra_interface.claim(compose_all(words), None)
    rule = "another process is writing its results there; wait for it, or give another directory"
    with pytest.raises(ConfigError, match=rule):
        hydra_interface.claim(compose_all(words), None)


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_sweep_is_not_carried_out_a_second_time_beside_the_first(tmp_path, monkeypatch, cluster):
    monkeypatch.chdir(tmp_path)
    words = [f"cluster={cluster}", "model=toy", "seed=0,1"]
    running = hydra_interface.claim(compose_all(words, True), None)
    line = resume.read([f"sweep.resume={running}"], True, None)
    composed = compose_all(line.overrides, True)
    with pytest.raises(ConfigError, match="another process is writing its results there"):
        hydra_interface.claim(composed, line.goes_on)
    store.unlock(running)  # as where all jobs have been submitted
    assert hydra_interface.claim(composed, line.goes_on) == running
