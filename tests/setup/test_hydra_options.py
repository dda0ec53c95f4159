"""Hydra's own options: what is refused since it would do nothing here, and the launchers that there are."""

import shlex
from pathlib import Path

import pytest

from ptdbench.launch.world import World
from ptdbench.planning import plans
from ptdbench.problems import ConfigError
from ptdbench.setup import hydra_options
from ptdbench.setup.compose import Source, compose_all
from tests.conftest import ROOT
from tests.refusals import Abridged, refusal_of

CONF = ROOT / "conf"


def refused(*overrides: str, world: World | None = None, goes_on: Path | None = None) -> str:
    composed = compose_all(["model=toy", *overrides])
    return refusal_of(hydra_options.check, composed, world, goes_on)


#: What is typed and would do nothing, and the whole answer.
TOLD = {
    "hydra.job.chdir=true": "hydra.job.chdir=true: runs start in the current directory; omit it",
    "hydra.verbose=true": "hydra.verbose=true: nothing is logged through Hydra; omit it",
    "hydra/job_logging=default": "hydra.job_logging={...}: nothing is logged through Hydra; omit it",
    "hydra/hydra_logging=default": "hydra.hydra_logging={...}: nothing is logged through Hydra; omit it",
    "+hydra.callbacks.mine={_target_:my.Callback}": "hydra.callbacks={...}: … they would never be called; omit it",
    "hydra.sweep.dir=x": "hydra.sweep.dir=x: is for sweeps, and this is a single run; try hydra.run.dir=x",
    "hydra/launcher=ptdbench": "hydra/launcher=ptdbench: …; try basic, submitit_local, submitit_slurm",
    "hydra.mode=MULTIRUN hydra/launcher=submitit_local hydra.launcher.timeout_min=5": "hydra.launcher.timeout_min=5: "
    "has no effect with hydra/launcher=submitit_local; omit it",
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
    hydra_options.check(composed, None, Path("x"))  # a sweep begun so goes on
    composed = compose_all(["model=toy", "hydra.job.chdir=false", "hydra.verbose=false", "hydra/job_logging=none"])
    hydra_options.check(composed, None, None)


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

    @pytest.mark.parametrize(("launcher", "words", "told"), [
        ("submitit_slurm", ["cluster=slurm"], [Abridged(f"{RULE}; see …"), f"{RULE}; try cluster.partition=short"]),
        ("submitit_local", [], ["has no effect with hydra/launcher=submitit_local; omit it"]),
    ])  # fmt: skip
    def test_in_a_file_as_typed(self, tmp_path, launcher, words, told):
        partition = "partition: short, array_parallelism: 2, " * (launcher == "submitit_slurm")
        text = f"hydra: {{mode: MULTIRUN, launcher: {{{partition}timeout_min: 3}}}}\n"
        (tmp_path / "experiment").mkdir()
        head = f"# @package _global_\ndefaults: [override /hydra/launcher: {launcher}]\n"
        (tmp_path / "experiment" / "mine.yaml").write_text(head + text)
        composed = compose_all(["model=toy", "experiment=mine", *words], source=Source(CONF, extra=str(tmp_path)))
        found = refusal_of(hydra_options.check, composed, None, None).splitlines()
        assert [problem.partition(": ")[2] for problem in found] == told


def test_runs_of_a_sweep_have_directories_of_their_own():
    rule = "hydra.sweep.subdir=${model.name}: runs 0, 1 would have the same directory; add ${hydra.job.num} to it"
    assert refused("seed=1,2", "hydra.sweep.subdir='${model.name}'", "hydra.mode=MULTIRUN") == rule
    rule = "hydra.sweep.subdir=s${seed}: runs 0, 3 would have the same directory; add ${hydra.job.num} to it"
    assert refused("seed=1,2", "repeat=2", "hydra.sweep.subdir='s${seed}'", "hydra.mode=MULTIRUN") == rule
    for own in ("'s${seed}'", "${model.name}_${hydra.job.num}"):
        composed = compose_all(["model=toy", "seed=1,2", f"hydra.sweep.subdir={own}"], True)
        hydra_options.check(composed, None, None)
        assert composed.hydras[0] == f"hydra.sweep.subdir={own}"
    for own in ("'s${seed}_${repeat.block}'", "${hydra.job.override_dirname}"):
        hydra_options.check(compose_all(["seed=1,2", "repeat=2", f"hydra.sweep.subdir={own}"], True), None, None)


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
    hydra_options.check(compose_all(["model=toy", "hydra.sweep.dir=x/${nope}"]), None, Path("x"))
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
