"""``python train.py`` and ``ptdbench train``: what is checked before Hydra starts, and what is printed when it is done.

Nothing here imports torch until the command line has been understood, so that ``--help`` and misspellings answer
at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ptdbench.launch import leaving, local, slurm
from ptdbench.launch.world import World, discover, is_first_rank
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import alternatives, noise, objective, record, store
from ptdbench.report import table, text
from ptdbench.report.reason import reason
from ptdbench.setup import blocks, commandline, compose, config, hydra_launcher, hydra_sweeper, resume, show
from ptdbench.setup.config import Slurm
from ptdbench.sweep import directory as output
from ptdbench.terminal import hint, plural, say

if TYPE_CHECKING:
    from ptdbench.sweep.agenda import Agenda

#: Seconds that a refused rank waits for rank 0 to report the reason: mpirun and torchrun end all ranks as soon as one
#: has failed, and rank 0 may have started later. When rank 0 has failed, they end the ranks that wait.
REFUSED_WAIT = 30.0

#: The same in a SLURM step, where srun does not end the ranks that wait: a refused command takes so much longer.
REFUSED_WAIT_IN_STEP = 5.0

#: What rank 0 of a run that trains writes TensorBoard's files with.
EVENT_FILES = ("torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata")


def main() -> NoReturn:
    """Carry out the command line; never returns.

    Exit status 0: every run was ok. 1: one was not, or the command line could not be used. ``128 + n``: signal ``n``.
    """
    try:
        local.stop_on_signals()
        sys.exit(_main())
    except ConfigError as error:
        if is_first_rank(os.environ) or type(error) is not ConfigError:  # what only this rank may know
            say(str(error), sys.stderr)
        else:
            _await_rank_0()
        sys.exit(1)
    except store.Damaged as damage:  # by somebody, while this process was going on
        say(str(damage), sys.stderr)
        sys.exit(1)
    except local.Stopped as stop:
        say(str(stop), sys.stderr)
        sys.exit(128 + stop.signal)
    finally:
        leaving.soon()


def _await_rank_0() -> None:
    """Wait while rank 0 reports why the command line was refused."""
    with suppress(local.Stopped, ConfigError):  # the environment itself may be what was refused
        world = discover(os.environ)
        time.sleep(REFUSED_WAIT_IN_STEP if world and world.started_by.has_step else REFUSED_WAIT)


def one_run(composed: DictConfig) -> float | None:
    """What Hydra calls for each job: run it, and in a sweep add its record to the sweep's results.

    Returns:
        The figure that ``objective`` names, for Hydra's sweepers; ``None`` for a run that has none, and in all ranks
        but the first.

    Raises:
        SystemExit: The run's record cannot be written; whoever comes next in a sweep could not write either.
    """
    from ptdbench.run import run
    from ptdbench.sweep.launchers import OneAfterTheOther

    chosen = HydraConfig.get()
    directory, is_sweep = Path(chosen.runtime.output_dir), chosen.mode == RunMode.MULTIRUN
    agenda = OneAfterTheOther.agenda
    try:
        try:
            if not agenda.requests:  # in a job's process, which did not read the command line
                run(composed, directory)
            elif is_sweep:
                _one_of_several(composed, directory, agenda, chosen.job.num)
            else:
                run(composed, directory, agenda.requests[0].summary)
        finally:
            if is_sweep and is_first_rank(os.environ):
                _add_result(Path(chosen.sweep.dir), directory)
    except OSError as error:  # of the run itself only what it could not write comes here
        reason = f"{directory}: its record cannot be written: {error.strerror or error}"
        whole = Path(chosen.sweep.dir) if is_sweep else directory
        say(f"{reason}; make room, and go on with {resume.command(whole)}", sys.stderr)
        raise SystemExit(1) from None
    if not is_first_rank(os.environ):
        return None
    return objective.value(store.load_record(directory), config.read(composed).general.objective)


def _one_of_several(composed: DictConfig, directory: Path, agenda: Agenda, number: int) -> None:
    """Carry out a run of a sweep; one that fails says so, as the table comes only when all have ended."""
    from ptdbench.run import run

    heading, started = agenda.outlook.heading(number), time.monotonic()
    run(composed, directory, agenda.requests[number].summary, heading)
    if is_first_rank(os.environ):
        written = store.load_record(directory)
        agenda.outlook.ended(number, time.monotonic() - started, written)
        if written["status"] != "ok":
            say(f"{heading}: {reason(written)}", sys.stderr)


def _add_result(sweep_directory: Path, directory: Path) -> None:
    """Add the record of a run that has ended to its sweep's results."""
    written = store.load_record(directory)
    if not record.is_open(written):
        store.append_result(sweep_directory, written)


def _main() -> int:
    arguments = commandline.parse()
    conf = Path(arguments.config_path).resolve() if arguments.config_path else compose.conf_folder()
    if arguments.config_path:
        sys.argv += ["--config-path", str(conf)]  # Hydra would look for it beside this file
    task = hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(one_run)
    if arguments.hydra_help or arguments.shell_completion:
        return show.show(task)
    _import_from_here()
    commandline.imply(arguments)
    line = resume.read(arguments.overrides, arguments.multirun, discover(os.environ))
    commandline.retype(arguments, line.overrides)
    composed = compose.compose_all(
        conf, arguments.config_name or "config", arguments.overrides, arguments.multirun, arguments.config_dir
    )
    if arguments.cfg:
        return show.show_configs(task, arguments, composed)
    if arguments.help or arguments.info:
        return show.show(task, bool(arguments.help)) if is_first_rank(os.environ) else 0

    cluster, world = _cluster(composed), discover(os.environ)
    hydra_launcher.check(composed, cluster, world)
    hydra_sweeper.check(composed, cluster, world, line.goes_on)
    blocks.check(composed, cluster, world, line.goes_on)
    if isinstance(cluster, Slurm):
        return _on_cluster(task, arguments, composed, line)
    return _here(task, arguments, composed, world, line)


def _import_from_here() -> None:
    """Let a model of the user's own lie in the current directory, however this process was started.

    Raises:
        ConfigError: Another ptdbench lies there: ranks and jobs would import that one.
    """
    here, package = Path.cwd(), Path(__file__).parent
    other = here / package.name
    if (other / "__init__.py").exists() and not other.samefile(package):
        rule = f"ranks started here would import it instead of {package}"
        raise ConfigError([Problem("ptdbench", other, rule, "use python train.py here, or another directory")])
    if str(here) not in sys.path:
        sys.path.insert(1, str(here))


def _here(
    task: Callable[[], Any],
    arguments: argparse.Namespace,
    composed: compose.Composed,
    world: World | None,
    line: resume.Line,
) -> int:
    """Runs on this machine, or as a rank of the world that a launcher made."""
    local.check_address_space()
    if world is None:
        local.warm_up(_rank_modules(composed.jobs))
    shows = world is None or world.rank == 0
    with hint(f"checking {plural(len(composed.jobs), 'run')}…", sys.stderr if shows else None):  # imports, too
        from ptdbench.launch import devices
        from ptdbench.setup import reshaping
        from ptdbench.sweep import launchers, requests
        from ptdbench.sweep.agenda import Agenda

        if world:
            for job in composed.jobs:
                devices.check(world, str(job.get("device")), str(job.get("backend")))
        runs = requests.of_machine(composed.jobs, composed.overrides, world)
    if line.goes_on and not composed.is_sweep and shows and runs[0].summary:
        reshaping.require_same(line.goes_on, runs[0].summary, runs[0].config.general.reshape)
    directory = output.claim(composed, arguments.overrides, world, line.goes_on)
    ours = [*output.output_overrides(composed.is_sweep, directory, world), *hydra_sweeper.overrides(composed)]
    commandline.insert(arguments.overrides, ours)
    agenda = Agenda.of(composed, runs, line.only)
    launchers.install(agenda)
    if world and world.rank > 0:
        _carry_out(task, directory, composed)
        return 0
    try:
        _carry_out(task, directory, composed)
    finally:
        asked = 0 if agenda.is_open else len(agenda.requests)
        records = _print_results(directory, composed.jobs, composed.is_sweep, asked)
    return int(_count_ok(records) < (max(1, len(records)) if agenda.is_open else len(agenda.requests)))


def _on_cluster(
    task: Callable[[], Any], arguments: argparse.Namespace, composed: compose.Composed, line: resume.Line
) -> int:
    """Runs that SLURM carries out as jobs."""
    from ptdbench.sweep import launchers, rehearsal, requests, submission, watch
    from ptdbench.sweep.agenda import Agenda

    cluster = _cluster(composed)
    assert isinstance(cluster, Slurm)
    options = composed.first.hydra.launcher
    runs = requests.of_cluster(composed.jobs, composed.overrides)
    if ignored := slurm.ignored_variables(os.environ):
        say(f"ignored: {' '.join(ignored)}; the resources of a job are given in the group cluster", sys.stderr)
    if cluster.submit == "test":
        return rehearsal.show(runs, options)
    rehearsal.require_accepted(runs, options)
    submission.make_folders(runs)
    directory = output.claim(composed, arguments.overrides, None, line.goes_on).resolve()  # a job may start elsewhere
    ours = [*output.output_overrides(composed.is_sweep, directory, None), *hydra_sweeper.overrides(composed)]
    commandline.insert(arguments.overrides, ours)
    queued = _queued(directory, line)
    agenda = Agenda.of(composed, runs, line.only, queued)
    launchers.install(agenda)
    if queued:
        names = ", ".join(sorted(queued))
        say(f"{plural(len(queued), 'run')} still in the queue, not submitted again: {names}", sys.stderr)
    _carry_out(task, directory, composed)
    if cluster.submit == "detach":
        return 0
    try:
        if not agenda.is_open:  # whose batches have been followed
            watch.follow(directory)
    finally:
        records = _print_results(directory, composed.jobs, True, 0 if agenda.is_open else len(agenda.requests))
    if line.only:  # what became of the sweep's other runs is not what was asked
        records = [record for record in records if store.below(directory, record["directory"]) == line.only]
    return int(_count_ok(records) < (max(1, len(records)) if agenda.is_open or line.only else len(agenda.requests)))


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


def _carry_out(task: Callable[[], Any], directory: Path, composed: compose.Composed) -> None:
    """Let Hydra run its jobs.

    Raises:
        ConfigError: The directory cannot be written to, or the sweeper of a search has failed.
    """
    with _hydra_raises():
        try:
            task()
        except OSError as error:
            rule = f"{error.filename or 'what belongs there'} cannot be written: {error.strerror or error}"
            remedy = f"make room, and go on with {resume.command(directory)}"
            raise ConfigError([Problem("directory", directory, rule, remedy)]) from None
        except Exception as error:
            if not composed.searches or isinstance(error, ConfigError):
                raise
            name = composed.first.hydra.runtime.choices[commandline.SWEEPER]
            reason = f"ended early: {' '.join(str(error).split())}"
            raise ConfigError([Problem(commandline.SWEEPER, name, reason)]) from error


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


def _count_ok(records: Sequence[Mapping[str, Any]]) -> int:
    return sum(record["status"] == "ok" for record in records)


def _rank_modules(jobs: Sequence[DictConfig]) -> list[str]:
    """Modules that the jobs' ranks will need; not a stranger's own, which might touch the GPU when imported."""
    groups = [node for job in jobs for node in config.resolve(job).values() if isinstance(node, dict)]
    targets = {str(group.get("_target_")) for group in groups}
    chosen = {target.rpartition(".")[0] for target in targets if target.startswith("ptdbench.")}
    return ["ptdbench.rank_imports", *sorted(chosen), *(EVENT_FILES if "ptdbench.workloads.train" in chosen else ())]


def _print_results(directory: Path, jobs: Sequence[DictConfig], is_sweep: bool, asked: int) -> list[dict[str, Any]]:
    """Print the table of what the runs left; nothing where a signal came before the first one began.

    Args:
        directory: Of the run or the sweep.
        jobs: The configurations that were typed; their workloads, also strangers', may show what they found.
        is_sweep: Whether it is one of a sweep.
        asked: How many runs were asked for.
    """
    if is_sweep:
        records = store.read_results(directory, lambda damage: say(damage, sys.stderr))
    else:
        records = [store.load_record(directory)] if (directory / store.RECORD).exists() else []
    if records:
        noise.keep(alternatives.group(records))
        typed = {str(OmegaConf.select(job, "workload._target_")) for job in jobs}
        text.show(table.render(records, shutil.get_terminal_size((110, 24)).columns, typed))
        say(table.closing_lines(directory, records))
    if _count_ok(records) < asked and _goes_on(directory, is_sweep, records):
        say(f"go on        {resume.command(directory)}")
    return records


def _goes_on(directory: Path, is_sweep: bool, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether to say how to go on: with what is missing of a sweep, or with a run that no message says it of."""
    from ptdbench.checkpoints import shelf

    if is_sweep or not records:
        return is_sweep
    (only,) = records
    said = "resume=" in str((only.get("error") or {}).get("message"))
    return not said and shelf.glance(directory) is not None
