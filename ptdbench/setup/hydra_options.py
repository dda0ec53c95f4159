"""Checks of Hydra's own options: the launcher, the sweeper, and options that would have no effect."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ptdbench.grouping import grouped
from ptdbench.launch.world import World
from ptdbench.problems import Problem, as_typed, first_line, in_shell, require
from ptdbench.records.effects import leaves
from ptdbench.setup import runs
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, values
from ptdbench.setup.compose import Composed
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.runs import numbered
from ptdbench.terminal import command

#: Options of the launcher other than resources, with their defaults.
OPTIONS = {"array_parallelism": 256, "signal_delay_s": 120}

#: Options of Hydra that have an effect only in a program whose jobs Hydra itself runs.
_NO_EFFECT = {
    "callbacks": "ptdbench runs the jobs, not Hydra, so they would never be called",
    "job.chdir": "runs start in the current directory",
    "sweeper.max_batch_size": "a sweep is one batch",
    **dict.fromkeys(("verbose", "job_logging.root", "hydra_logging.root"), "nothing is logged through Hydra"),
}

#: The supported launchers.
LAUNCHERS = ("basic", "submitit_local", "submitit_slurm")


def check(composed: Composed, world: World | None, goes_on: Path | None) -> None:
    """Refuse options without effect, a launcher that does not fit, and a search that could not work."""
    require(*unresolved(composed))
    require(*(problem for whole in composed.wholes for problem in _without_effect(whole.hydra)))
    require(_elsewhere(composed) if goes_on is None else None)
    _check_launcher(composed, world)
    if composed.launcher == "submitit_local" and goes_on is None:
        rule = f"has no effect with {LAUNCHER}=submitit_local"  # one run follows the other
        require(*(Problem(name, value, rule, "omit it") for name, value in _of_launcher(composed).items()))
    if composed.is_sweep:
        require(_misplaced(composed))
    if composed.searches:
        require(*_unfit_for_search(composed, goes_on))


def unresolved(composed: Composed) -> Iterator[Problem]:
    """Yield what keeps a run's directory or environment variables from being known: references without a value."""
    for whole in composed.wholes:
        hydra = numbered(whole, 0).hydra
        try:
            _ = (hydra.sweep.dir, hydra.sweep.subdir) if composed.is_sweep else hydra.run.dir
            dict(hydra.job.env_set)
        except OmegaConfBaseException as error:
            if nameless := re.search(r"key '(\w+)\.name' not found", str(error)):
                choice = hydra.runtime.choices[nameless[1]]
                yield Problem(nameless[1], choice, "its file gives it no name", f"add the line name: {choice}")
                return
            written: Any = OmegaConf.to_container(whole, resolve=False)
            rule = f"refers to something without a value ({first_line(error).rpartition('interpolation: ')[2]})"
            option = str(error.full_key)
            yield Problem(option, dict(leaves(written)).get(option), rule, "give the value itself")


def _without_effect(hydra: DictConfig) -> Iterator[Problem]:
    for name, rule in _NO_EFFECT.items():
        if value := OmegaConf.select(hydra, name):
            value = "{...}" if OmegaConf.is_config(value) else as_typed(value)
            yield Problem(f"hydra.{name.removesuffix('.root')}", value, rule, "omit it")


def _elsewhere(composed: Composed) -> Problem | None:
    """Find a single run's directory given for a sweep, or the other way round."""
    other, ours = ("run", "sweep") if composed.is_sweep else ("sweep", "run")
    typed = values(composed.hydras)
    if f"hydra.{other}.dir" not in typed or f"hydra.{ours}.dir" in typed:
        return None
    rule = "is for single runs, and this is a sweep" if composed.is_sweep else "is for sweeps, and this is a single run"
    value = typed[f"hydra.{other}.dir"]
    return Problem(f"hydra.{other}.dir", value, rule, f"try {in_shell(f'hydra.{ours}.dir', value)}")


def _misplaced(composed: Composed) -> Problem | None:
    """Find runs outside the directory of their sweep, or several in one directory."""
    place = numbered(composed.wholes[0], 0).hydra.sweep.subdir
    if Path(os.path.normpath(place)).parts[:1] in ((), ("/",), ("..",)):
        rule = "is not below the directory of the sweep"  # whose results would lack them
        return Problem("hydra.sweep.subdir", place, rule, "give a directory below it, or another hydra.sweep.dir")
    template = composed.hydra.sweep._get_node("subdir")._value()
    if composed.searches or "job.num" in template:  # as it has by default
        return None
    named = grouped((run.subdirectory, run.number) for run in runs.of(composed))
    same = next((numbers for numbers in named.values() if len(numbers) > 1), None)
    if same is None:
        return None
    rule = f"runs {', '.join(map(str, same[:8]))}{' ...' * (len(same) > 8)} would have the same directory"
    return Problem("hydra.sweep.subdir", template, rule, "add ${hydra.job.num} to it")


def _check_launcher(composed: Composed, world: World | None) -> None:
    """Refuse a launcher that contradicts the cluster, or that ranks would start."""
    launcher, cluster = composed.launcher, composed.configs[0].cluster
    submits = isinstance(cluster, Slurm)
    if launcher not in LAUNCHERS:
        require(Problem(LAUNCHER, launcher, "runs are started by ptdbench", f"try {', '.join(LAUNCHERS)}"))
    if submits != (launcher == "submitit_slurm"):
        rule = f"does not go with cluster={cluster.name}"
        remedy = "omit it" if submits else "try cluster=slurm, or basic or submitit_local for this machine"
        require(Problem(LAUNCHER, launcher, rule, remedy))
    if submits and not composed.is_sweep:
        require(Problem("hydra.mode", "RUN", f"cluster={cluster.name} submits jobs, which is a sweep", "omit it"))
    if cluster.name == "env" and (world is None or world.launcher != "env"):
        rule, remedy = "every rank looks for this very word", "type it, or set PTDBENCH_ENV=1 for all ranks"
        if world:
            rule, remedy = f"is for ranks without another launcher, and {world.launcher} started this one", "omit it"
        require(Problem("cluster", "env", rule, remedy))
    if world and launcher.startswith("submitit"):
        who = f"rank {world.rank} of {world.size} that {world.launcher} started"
        rule = f"this is {who}, and jobs are submitted by a process of its own"
        remedy = "start it with plain python, or omit cluster and launcher to run on these ranks"
        name, value = ("cluster", cluster.name) if submits else (LAUNCHER, launcher)
        require(Problem(name, value, rule, remedy))
    if submits:
        require(*_given_twice(composed))


def _given_twice(composed: Composed) -> Iterator[Problem]:
    """Refuse resources outside the group ``cluster``, with the option there if it has the same name."""
    rule = "the resources of a job are set in the group cluster only"
    alike = {field.name for field in fields(Slurm)} - {"name"}
    for full, value in _of_launcher(composed).items():
        if (name := full.removeprefix("hydra.launcher.")) not in OPTIONS:
            same = f"try {in_shell(f'cluster.{name}', value)}" if name in alike else ""
            yield Problem(full, value, rule, same or f"see {command()} cluster=slurm --cfg job --package cluster")


def _of_launcher(composed: Composed) -> dict[str, str]:
    """Return the options of the launcher that were typed, or that a file sets to other values than the plugin does."""
    plugin = ConfigStore.instance().load(f"{LAUNCHER}/{composed.launcher}.yaml").node
    default: Any = OmegaConf.to_container(plugin, resolve=False)
    ours: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    options = {f"hydra.launcher.{name}": as_typed(value) for name, value in ours.items() if value != default.get(name)}
    options |= values(composed.hydras)
    return {name: value for name, value in options.items() if name.startswith("hydra.launcher.")}


def _unfit_for_search(composed: Composed, goes_on: Path | None) -> Iterator[Problem]:
    """Yield problems that would prevent a search from working.

    The basic sweeper's runs are known when the command line is read. Those of a search are not: two runs, with the
    first and with the last value of everything searched, stand for all and are checked before anything starts.
    """
    name, first = composed.sweeper, composed.configs[0]
    yield from undecided(f"{SWEEPER}={name}", composed.configs)
    if first.sweep.same_nodes:
        rule = f"{SWEEPER}={name} chooses each run by earlier results, and the runs of one job are chosen at once"
        yield Problem("sweep.same_nodes", as_typed(True), rule, "omit it")
    sweeper: Any = OmegaConf.to_container(composed.hydra.sweeper, resolve=False)
    if isinstance(trials := sweeper.get("n_trials"), int) and trials < 1:
        yield Problem("hydra.sweeper.n_trials", trials, "must be at least 1")
    is_seeded = any(option.rpartition(".")[2] == "seed" and value is not None for option, value in leaves(sweeper))
    if goes_on and not is_seeded:
        rule = f"its values were drawn without a seed, and {name} would draw others now"
        remedy = "start another sweep; one that can be resumed sets hydra.sweeper.sampler.seed"
        yield Problem("sweep.resume", goes_on, rule, remedy)


def undecided(chooser: str, configs: Sequence[Config]) -> Iterator[Problem]:
    """Yield what keeps the results of runs from deciding which runs follow, as the option ``chooser`` lets them."""
    for virtual in (config.call("virtual").name for config in configs if "virtual" in config.resolved):
        rule = f"a virtual GPU computes nothing and takes no time, so {chooser} has nothing to go by"
        yield Problem("virtual", virtual, rule, f"omit {chooser}, or try virtual=none")
    if isinstance(cluster := configs[0].cluster, Slurm) and cluster.submit == "detach":
        rule = f"{chooser} needs the results of its jobs before it can choose the next ones"
        yield Problem("cluster.submit", "detach", rule, "try wait")
