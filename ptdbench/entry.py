"""Around Hydra: what is checked before it starts, and what is told when it is done.

Nothing here imports torch until the command line has been understood, so that ``--help`` and misspellings answer
at once.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ptdbench.launch import leaving, local, slurm
from ptdbench.launch.world import World, discover
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records import lease, record, store
from ptdbench.report import table
from ptdbench.setup import commandline, compose, config, resume
from ptdbench.setup.commandline import LAUNCHER
from ptdbench.setup.config import Slurm
from ptdbench.terminal import say


def main(task: Callable[[], None], conf: Path) -> None:
    """Run a ``@hydra.main`` function; never returns.

    Exit status 0: every run was ok. 1: one was not, or the command line could not be used. ``128 + n``: signal ``n``.
    """
    try:
        local.stop_on_signals()
        sys.exit(_main(task, conf))
    except ConfigError as error:
        if _speaks() or type(error) is not ConfigError:  # what only this rank may know
            say(str(error), sys.stderr)
        sys.exit(1)
    except store.Damaged as damage:  # by somebody, while this process was going on
        say(str(damage), sys.stderr)
        sys.exit(1)
    except local.Stopped as stop:
        say(str(stop), sys.stderr)
        sys.exit(128 + stop.signal)
    finally:
        leaving.soon()


def one_run(composed: DictConfig, directory: Path) -> None:
    """What Hydra calls for each job: run it, and in a sweep add its record to the sweep's results.

    Raises:
        SystemExit: The run's record cannot be written; whoever comes next in a sweep could not write either.
    """
    from ptdbench.run import run

    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    world = discover(os.environ)
    try:
        try:
            run(composed, directory)
        finally:
            if is_sweep and (world is None or world.rank == 0):
                _add_result(Path(HydraConfig.get().sweep.dir), directory)
    except OSError as error:  # of the run itself only what it could not write comes here
        reason = f"{directory}: its record cannot be written: {error.strerror or error}"
        whole = Path(HydraConfig.get().sweep.dir) if is_sweep else directory
        say(f"{reason}; make room, and go on with {resume.command(whole)}", sys.stderr)
        raise SystemExit(1) from None


def _add_result(sweep_directory: Path, directory: Path) -> None:
    """Add the record of a run that has ended to its sweep's results."""
    written = store.load_record(directory)
    if not record.is_open(written):
        store.append_result(sweep_directory, written)


def _main(task: Callable[[], None], conf: Path) -> int:
    arguments = commandline.parse()
    if arguments.hydra_help or arguments.shell_completion:
        return _show(task)
    if arguments.config_path:
        conf = conf.parent / arguments.config_path  # relative to train.py, as in Hydra
    commandline.imply(arguments)
    line = resume.read(arguments.overrides, arguments.multirun, discover(os.environ))
    commandline.retype(arguments, line.overrides)
    composed = compose.compose_all(
        conf, arguments.config_name or "config", arguments.overrides, arguments.multirun, arguments.config_dir
    )
    if arguments.cfg:
        return _show_configs(task, arguments, composed)
    if arguments.help or arguments.info:
        return _show(task) if _speaks() else 0

    cluster, world = _cluster(composed), discover(os.environ)
    _check_launcher(composed, cluster, world)
    if isinstance(cluster, Slurm):
        return _on_cluster(task, arguments, composed, line)
    return _here(task, arguments, composed, world, line)


def _here(
    task: Callable[[], None],
    arguments: argparse.Namespace,
    composed: compose.Composed,
    world: World | None,
    line: resume.Line,
) -> int:
    """Runs on this machine, or as a rank of the world that a launcher made."""
    if world is None:
        local.warm_up(_own_modules(composed.jobs))
    from ptdbench.sweep import launchers, requests
    from ptdbench.sweep.agenda import Agenda

    runs = requests.of_machine(composed.jobs, composed.overrides, world)
    directory = _claim(composed, arguments.overrides, world, line.goes_on)
    commandline.insert(arguments.overrides, _output_overrides(composed.is_sweep, directory, world))
    launchers.install(Agenda(runs, line.only))
    if world and world.rank > 0:
        _carry_out(task, directory)
        return 0
    try:
        _carry_out(task, directory)
    finally:
        records = _records(directory, composed.is_sweep)
        _tell(records, directory)
    return int(_count_ok(records) < len(composed.jobs))


def _on_cluster(
    task: Callable[[], None], arguments: argparse.Namespace, composed: compose.Composed, line: resume.Line
) -> int:
    """Runs that SLURM carries out as jobs."""
    from ptdbench.sweep import launchers, rehearsal, requests, submission, watch
    from ptdbench.sweep.agenda import Agenda

    cluster = _cluster(composed)
    assert isinstance(cluster, Slurm)
    options = composed.first.hydra.launcher
    runs = requests.of_cluster(composed.jobs, composed.overrides)
    if ignored := slurm.unheeded(os.environ):
        say(f"not heeded: {' '.join(ignored)}; what a job is given is said in the group cluster", sys.stderr)
    if cluster.submit == "test":
        return rehearsal.show(runs, options)
    rehearsal.require_accepted(runs, options)
    submission.make_folders(runs)
    directory = _claim(composed, arguments.overrides, None, line.goes_on).resolve()  # a job may start elsewhere
    commandline.insert(arguments.overrides, _output_overrides(composed.is_sweep, directory, None))
    launchers.install(Agenda(runs, line.only, queued := _queued(directory, line)))
    if queued:
        count = f"{len(queued)} run{'s' * (len(queued) != 1)}"
        say(f"{count} still in the queue, not submitted again: {', '.join(sorted(queued))}", sys.stderr)
    _carry_out(task, directory)
    if cluster.submit == "detach":
        return 0
    try:
        watch.follow(directory)
    finally:
        _tell(records := _records(directory, is_sweep=True), directory)
    if line.only:  # what became of the sweep's other runs is not what was asked
        meant = [record for record in records if store.below(directory, record["directory"]) == line.only]
        return int(_count_ok(meant) < 1)
    return int(_count_ok(records) < len(composed.jobs))


def _queued(directory: Path, line: resume.Line) -> frozenset[str]:
    """The runs of a sweep that goes on whose jobs have not ended: each is left to its job.

    Raises:
        ConfigError: SLURM does not answer, so that nobody knows.
    """
    from ptdbench.sweep import status

    if not line.goes_on or not any(directory.glob(f"**/{store.RECORD}")):
        return frozenset()
    sweep = status.look(directory)
    if sweep.silence:
        rule = f"SLURM does not say which of its jobs still run: {sweep.silence}"
        raise ConfigError([Problem(resume.SWEEP, directory, rule, "try again when it answers")])
    return frozenset(run.directory for run in sweep.runs if run.queue and not run.queue.is_over)


def _carry_out(task: Callable[[], None], directory: Path) -> None:
    """Let Hydra run its jobs.

    Raises:
        ConfigError: The directory cannot be written to.
    """
    with _hydra_raises():
        try:
            task()
        except OSError as error:
            rule = f"{error.filename or 'what belongs there'} cannot be written: {error.strerror or error}"
            remedy = f"make room, and go on with {resume.command(directory)}"
            raise ConfigError([Problem("directory", directory, rule, remedy)]) from None


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Hydra would turn every exception into a traceback and ``sys.exit(1)``, which says nothing of what it was."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _cluster(composed: compose.Composed) -> config.Cluster:
    """The cluster of the first job; all jobs have the same, if not the same shape."""
    return config.read(composed.jobs[0]).cluster


def _launcher(composed: compose.Composed) -> str:
    """The choice of Hydra's launcher, such as ``basic`` or ``submitit_slurm``."""
    return str(composed.first.hydra.runtime.choices.get(LAUNCHER))


def _check_launcher(composed: compose.Composed, cluster: config.Cluster, world: World | None) -> None:
    """Refuse a launcher that would not do what the cluster says, or would start launchers of launchers."""
    launcher, submits = _launcher(composed), isinstance(cluster, Slurm)
    if submits != (launcher == "submitit_slurm"):
        rule = f"does not go with cluster={cluster.name}"
        remedy = "leave it away" if submits else "try cluster=slurm, or basic or submitit_local for this machine"
        require(Problem(LAUNCHER, launcher, rule, remedy))
    if submits and not composed.is_sweep:
        require(Problem("hydra.mode", "RUN", f"cluster={cluster.name} submits jobs, which is a sweep", "leave it away"))
    if world and launcher.startswith("submitit"):
        rule = (
            f"this is rank {world.rank} of {world.size} that {world.launcher} started; each would submit the jobs again"
        )
        remedy = "start it with plain python, or leave cluster and launcher away to run on these ranks"
        name, value = ("cluster", cluster.name) if submits else (LAUNCHER, launcher)
        require(Problem(name, value, rule, remedy))
    require(*_twice_said(composed, submits))


def _twice_said(composed: compose.Composed, submits: bool) -> list[Problem]:
    """Resources are said in one place, the group ``cluster``."""
    if not submits:
        return []
    rule = "what a job is given is said in the group cluster, once"
    remedy = "see python train.py cluster=slurm --cfg job --package cluster"
    typed = dict(override.partition("=")[::2] for override in composed.first.hydra.overrides.hydra)
    names = [name for name in typed if name.startswith("hydra.launcher.") and name not in PASSED_ON]
    return [Problem(name, typed[name], rule, remedy) for name in names]


#: Options of the launcher that say nothing of resources.
PASSED_ON = ("hydra.launcher.array_parallelism", "hydra.launcher.signal_delay_s")


def _records(directory: Path, is_sweep: bool) -> list[dict[str, Any]]:
    """What the runs left; nothing where a signal came before the first one began."""
    if is_sweep:
        return store.read_results(directory, lambda damage: say(damage, sys.stderr))
    return [store.load_record(directory)] if (directory / store.RECORD).exists() else []


def _count_ok(records: Sequence[Mapping[str, Any]]) -> int:
    return sum(record["status"] == "ok" for record in records)


def _show(task: Callable[[], None]) -> int:
    """Let Hydra show what was asked for instead of running it; 0, the exit status."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            task()
    except (ValueError, OmegaConfBaseException) as error:  # flags that exclude each other, what cannot be resolved
        reason = str(error).partition("\n")[0]
        raise ConfigError([Problem("command line", " ".join(sys.argv[1:]), reason)]) from None
    finally:
        if shown.getvalue():
            say(shown.getvalue().removesuffix("\n"))
    return 0


def _show_configs(task: Callable[[], None], arguments: argparse.Namespace, composed: compose.Composed) -> int:
    """Let Hydra show the configuration of every job; of a sweep it would show none."""
    if not _speaks():
        return 0
    if not composed.is_sweep or len(composed.jobs) == 1:
        sys.argv = [word for word in sys.argv if word not in ("-m", "--multirun")]
        return _show(task)
    hydras = [word for word in arguments.overrides if word.startswith(("hydra.", "hydra/"))]
    flags = [word for word in sys.argv[1:] if word not in arguments.overrides and word not in ("-m", "--multirun")]
    for number, overrides in enumerate(composed.overrides):
        say(f"{'---' + chr(10) if number else ''}# run {number}: {' '.join(overrides)}")
        sys.argv[1:] = [*overrides, *hydras, *flags]
        GlobalHydra.instance().clear()
        _show(task)
    return 0


def _own_modules(jobs: Sequence[DictConfig]) -> list[str]:
    """Modules of this package that the jobs' ranks will need; a stranger's might touch the GPU when imported."""
    groups = [node for job in jobs for node in config.resolve(job).values() if isinstance(node, dict)]
    targets = {str(group.get("_target_")) for group in groups}
    return sorted(target.rpartition(".")[0] for target in targets if target.startswith("ptdbench."))


def _claim(composed: compose.Composed, overrides: Sequence[str], world: World | None, goes_on: Path | None) -> Path:
    """The output directory: one that nobody else has, and the same for every rank."""
    option = "hydra.sweep.dir" if composed.is_sweep else "hydra.run.dir"
    hydra = composed.first.hydra
    wish = Path(hydra.sweep.dir if composed.is_sweep else hydra.run.dir)

    def claim() -> str:
        if not any(override.startswith(f"{option}=") for override in overrides):
            return str(store.claim_directory(wish.parent, wish.name, option, fill))
        store.occupy(wish, option, fill, again=bool(goes_on or slurm.restarts(os.environ)))
        return str(wish)

    def fill(folder: Path, name: Path) -> None:
        _begin(composed, folder, name)

    if world is None:
        return Path(claim())
    from ptdbench.launch import rendezvous

    return Path(rendezvous.agree("directory", world, claim() if world.rank == 0 else None))


def _begin(composed: compose.Composed, folder: Path, directory: Path) -> None:
    """The first file of a run or a sweep: what it is, for whoever finds it after the program was killed."""
    from ptdbench.records import ledger

    if composed.is_sweep:
        ledger.begin(folder, composed.typed)
        return
    lease.open_record(folder, record.begin(config.resolve(composed.jobs[0]), directory, {}, composed.typed))


def _output_overrides(is_sweep: bool, directory: Path, world: World | None) -> list[str]:
    option = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
    overrides = [f"{option}='{directory}'"]
    if world and world.rank > 0:  # all ranks share the directory, and one writes into it
        overrides.append("hydra.output_subdir=null")
    return overrides


def _tell(records: Sequence[Mapping[str, Any]], directory: Path) -> None:
    if records:
        say(table.render(records, max(shutil.get_terminal_size((110, 24)).columns, 100)))
        say(table.closing_lines(directory))


def _speaks() -> bool:
    """Whether this process is the one that says what concerns all ranks."""
    try:
        world = discover(os.environ)
    except ConfigError:
        return True
    return world is None or world.rank == 0
