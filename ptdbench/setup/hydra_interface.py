"""The interface to Hydra: its own options, what it prints and completes, its files and their directory."""

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ptdbench.grouping import grouped
from ptdbench.launch import slurm
from ptdbench.launch.world import World, restarts
from ptdbench.problems import ConfigError, Problem, as_typed, first_line, in_shell, require
from ptdbench.records import ledger, ownership, record, store
from ptdbench.records.effects import leaves
from ptdbench.setup import compose, runs
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, values
from ptdbench.setup.compose import Composed, Source
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.runs import Run, numbered
from ptdbench.terminal import command, echo

#: Options of the launcher other than resources, with their defaults.
LAUNCHER_OPTIONS = {"array_parallelism": 256, "signal_delay_s": 120}

#: Options of Hydra that have an effect only in a program whose jobs Hydra itself runs.
_NO_EFFECT = {
    "callbacks": "ptdbench runs the jobs, not Hydra, so they would never be called",
    "job.chdir": "runs start in the current directory",
    "sweeper.max_batch_size": "a sweep is one batch",
    **dict.fromkeys(("verbose", "job_logging.root", "hydra_logging.root"), "nothing is logged through Hydra"),
}


def check(composed: Composed, world: World | None, goes_on: Path | None) -> None:
    """Refuse options without effect, a launcher that does not fit, and a search that could not work."""
    require(*unresolved(composed))
    require(*(problem for whole in composed.wholes for problem in _without_effect(whole.hydra)))
    require(_elsewhere(composed) if goes_on is None else None)
    _check_launcher(composed, world)
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
    """Refuse a launcher other than the cluster's, and jobs that ranks would submit."""
    launcher, cluster = composed.launcher, composed.configs[0].cluster
    submits = isinstance(cluster, Slurm)
    if launcher != ("submitit_slurm" if submits else "basic"):
        remedy = "omit it" if submits else "try cluster=slurm, or basic for this machine"
        require(Problem(LAUNCHER, launcher, f"does not go with cluster={cluster.name}", remedy))
    if submits and not composed.is_sweep:
        require(Problem("hydra.mode", "RUN", f"cluster={cluster.name} submits jobs, which is a sweep", "omit it"))
    if cluster.name == "env" and (world is None or world.launcher != "env"):
        rule, remedy = "every rank looks for this very word", "type it, or set PTDBENCH_ENV=1 for all ranks"
        if world:
            rule, remedy = f"is for ranks without another launcher, and {world.launcher} started this one", "omit it"
        require(Problem("cluster", "env", rule, remedy))
    if world and submits:
        who = f"rank {world.rank} of {world.size} that {world.launcher} started"
        rule = f"this is {who}, and jobs are submitted by a process of its own"
        remedy = "start it with plain python, or omit cluster and launcher to run on these ranks"
        require(Problem("cluster", cluster.name, rule, remedy))
    if submits:
        require(*_given_twice(composed))


def _given_twice(composed: Composed) -> Iterator[Problem]:
    """Refuse resources outside the group ``cluster``, with the option there if it has the same name."""
    rule = "the resources of a job are set in the group cluster only"
    alike = {field.name for field in fields(Slurm)} - {"name"}
    for full, value in _of_launcher(composed).items():
        if (name := full.removeprefix("hydra.launcher.")) not in LAUNCHER_OPTIONS:
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
    """Yield problems that would prevent a search from working."""
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


def shown_by_hydra(arguments: argparse.Namespace, source: Source) -> int:
    """Let Hydra print the requested information; return exit status 0. Raises ConfigError with Hydra's reason."""
    with source.open():
        hydra: Any = GlobalHydra.instance().hydra
        if arguments.help:
            _show(hydra.app_help, source.name, get_args_parser(), arguments, adapt=_with_this_program)
        elif arguments.hydra_help:
            _show(hydra.hydra_help, source.name, get_args_parser(), arguments)
        elif arguments.shell_completion:
            _show(hydra.shell_completion, source.name, arguments.overrides)
        else:
            _show(hydra.show_info, arguments.info, source.name, arguments.overrides)
    return 0


def _show(task: Callable[..., object], *words: object, adapt: Callable[[str], str] = str) -> None:
    """Print what Hydra prints in a task; raises ConfigError with Hydra's reason."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            task(*words)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError([Problem("command line", " ".join(sys.argv[1:]), first_line(error))]) from None
    finally:
        if shown.getvalue():
            echo(adapt(shown.getvalue().removesuffix("\n")))


def _with_this_program(text: str) -> str:
    """Replace ``python train.py`` in the help, which an installed package lacks, with the program that was started."""
    typed = command()
    if typed == "python train.py":
        return text
    text = text.replace("python train.py", typed).replace(" train.py", " -m ptdbench train")
    return text.replace("python -m ptdbench status", command("status"))


def show_configs(arguments: argparse.Namespace, composed: Composed) -> int:
    """Let Hydra print the configuration of every run; return 0. Raises ConfigError with Hydra's reason."""
    several, source = composed.is_sweep and len(composed.overrides) > 1, composed.source
    with source.open():
        hydra: Any = GlobalHydra.instance().hydra
        for number, overrides in enumerate(composed.overrides[:1] if composed.searches else composed.overrides):
            if several:
                echo(f"{'---' + chr(10) if number else ''}# run {number}: {' '.join(overrides)}")
            words = [*composed.hydras, *overrides]
            _show(hydra.show_cfg, source.name, words, arguments.cfg, arguments.package, arguments.resolve)
    return 0


def completions(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return what a word that begins with ``prefix`` may become, after the overrides typed before it.

    The last value of a list is completed: ``parallel=ddp,fs`` becomes ``parallel=ddp,fsdp``.
    """
    name, equals, value = prefix.partition("=")
    *earlier, last = value.split(",")
    line = " ".join(["-m", *parsed_args.overrides, f"{name}{equals}{last}"])
    source = compose.source(parsed_args)
    with source.open():
        plugin = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
        words = plugin._query(source.name, line)
    return [f"{name}={','.join([*earlier, word.partition('=')[2]])}" for word in words] if earlier else words


def claim(composed: Composed, goes_on: Path | None) -> Path:
    """Create the output directory, or occupy the one that was typed or of the run or sweep that ``goes_on`` in place.

    Raises:
        ConfigError: It already holds results, or cannot be created.
    """
    typed, wish = "hydra.sweep.dir" if composed.is_sweep else "hydra.run.dir", composed.directory

    def fill(folder: Path, directory: Path) -> None:
        """Write the file that identifies the directory, in case the program is killed."""
        if composed.is_sweep:
            ledger.begin(folder, composed.typed)
            return
        ownership.open_record(folder, record.begin(composed.configs[0].resolved, directory, {}, composed.typed))

    if typed in values(composed.hydras):
        # torchrun also restarts a command that was refused because of other results there.
        again = goes_on or slurm.restarts(os.environ) or (restarts(os.environ) and _began(composed, wish))
        store.occupy(wish, typed, fill, bool(again))
        directory, is_latest = wish, wish.parent.resolve() == Path("outputs").resolve()
    else:
        directory, is_latest = store.claim_directory(wish.parent, wish.name, typed, fill), True
        store.lock(directory, typed)
    if composed.is_sweep and is_latest:
        store.point_latest(directory)
    return directory


def _began(composed: Composed, directory: Path) -> bool:
    """Return whether a directory contains what this command line began and has not finished."""
    with suppress(FileNotFoundError, PermissionError, store.Damaged):
        if composed.is_sweep:
            return ledger.read(directory).overrides == composed.typed
        written = store.load_record(directory)
        config = composed.configs[0].resolved
        return written["status"] != "ok" and record.same_work(record.configuration(written), config)
    return False


def write_files(run: Run, directory: Path, sweep: Path | None) -> None:
    """Write Hydra's three files of a run, unless ``hydra.output_subdir=null``; raises OSError."""
    hydra = dict(run.composed["hydra"])
    if hydra["output_subdir"] is None:
        return
    hydra["runtime"] = hydra["runtime"] | {"output_dir": str(directory.absolute())}
    if sweep:
        hydra["sweep"] = hydra["sweep"] | {"dir": str(sweep)}
    ours = {name: value for name, value in run.composed.items() if name != "hydra"}
    contents = {"config": ours, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    folder = directory / str(hydra["output_subdir"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        OmegaConf.save(OmegaConf.create(content), folder / f"{name}.yaml")


def write_multirun(sweep: DictConfig, directory: Path) -> None:
    """Write the configuration that a sweep's runs share, with the overrides typed for all of them."""
    with read_write(sweep), open_dict(sweep):
        sweep.hydra.sweep.dir = str(directory)
    OmegaConf.save(sweep, directory / "multirun.yaml")
