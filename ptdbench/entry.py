"""``python train.py`` and ``ptdbench train``: what is checked before anything starts, and what is printed at the end.

Nothing here imports torch or NumPy before the command line has been composed, so that ``--help`` and misspelled
options are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ptdbench import search_path
from ptdbench.launch import lifetime, local, settings, slurm
from ptdbench.launch.world import Place, World, discover, is_first_rank
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import ledger, store
from ptdbench.records.record import DONE
from ptdbench.records.run_record import RunRecord
from ptdbench.run import launched
from ptdbench.setup import commandline, compose, hydra_interface, resume
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.runs import Run, Shape
from ptdbench.terminal import echo, plural, transient

if TYPE_CHECKING:
    from ptdbench.sweep.execution import Agenda

#: The modules with which rank 0 of a training run writes TensorBoard files.
EVENT_FILES = ("torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata")


def main() -> NoReturn:
    """Execute the command line; never returns.

    Exit status 0: every run was ok. 1: a run was not, or the command line was invalid. ``128 + n``: signal ``n``.
    """
    exit_with(lambda: execute(commandline.parse())[0])


def exit_with(work: Callable[[], int]) -> NoReturn:
    """Call ``work``, which executes runs, and exit with its status, or with the status of the signal or error."""
    try:
        local.stop_on_signals()
        set_up()
        sys.exit(work())
    except (ConfigError, store.Damaged) as error:
        if is_first_rank(os.environ) or type(error) is not ConfigError:  # perhaps only this rank knows it
            echo(str(error), sys.stderr)
        launched.dismiss(error if isinstance(error, ConfigError) else ConfigError([]))
        sys.exit(1)
    except local.Stopped as stop:
        echo(str(stop), sys.stderr)
        sys.exit(128 + stop.signal)
    finally:
        lifetime.exit_soon()


def set_up() -> None:
    """Apply what must be set before torch is imported; raises ConfigError if ``cluster=env`` is wrong."""
    settings.log_errors_only(os.environ)
    launched.recognize(os.environ, sys.argv)
    if discover(os.environ) is None:
        settings.defer_sanitizer(os.environ)


#: An exit status, and the directory of the run or sweep; ``None`` if there was nothing to execute.
Ended = tuple[int, Path | None]


def execute(arguments: argparse.Namespace) -> Ended:
    """Execute a command line.

    Raises:
        ConfigError: It is invalid, which is found before anything starts, or results cannot be written.
        Damaged: A record that it resumes is damaged.
        SystemExit: This process is a rank, and a run failed here.
        Stopped: A signal asked this process to stop.
    """
    source = compose.source(arguments)
    if arguments.hydra_help or arguments.shell_completion or (arguments.help and not arguments.overrides):
        return hydra_interface.shown_by_hydra(arguments, source), None
    search_path.add_current()
    world = discover(os.environ)
    shows = arguments.cfg or arguments.help or arguments.info
    if world and not world.is_first:
        return 0, None if shows else _follow(world)
    words = commandline.with_implied(arguments)
    line = resume.read(words, arguments.multirun, world, source.name)
    composed = compose.compose_all(line.overrides, arguments.multirun, source)
    resume.check_targets(words, composed.configs)
    if shows:
        if arguments.cfg:
            return hydra_interface.show_configs(arguments, composed), None
        return hydra_interface.shown_by_hydra(arguments, source), None
    from ptdbench.sweep import blocks

    hydra_interface.check(composed, world, line.goes_on)
    blocks.check(composed, line.goes_on)
    cluster = composed.configs[0].cluster  # the same for all jobs, except for their shape
    return _on_cluster(composed, cluster, line) if isinstance(cluster, Slurm) else _locally(composed, world, line)


def _follow(world: World) -> Path | None:
    """Execute the runs that rank 0 names; return the directory of the run or sweep."""
    directory = launched.follow(world)
    return directory and (ledger.sweep_of(directory) or directory)


def execute_runs(directories: Sequence[Path]) -> int:
    """Execute the runs of directories, one after the other; return the exit status.

    A run that another process is executing, or whose record cannot be written, counts as not ok; the others continue.

    Raises:
        ConfigError: One of them is not a run that can be executed from here.
    """
    search_path.add_current()
    if (world := discover(os.environ)) and not world.is_first:
        _follow(world)
        return 0
    unique = {directory.resolve(): directory for directory in directories}
    configs = {directory: resume.startable(directory, world) for directory in unique.values()}
    if world:
        settings.enable_expandable_segments(os.environ)  # before this rank's GPU is used
    else:
        prepare_ranks([*configs.values()])

    from ptdbench.run.door import reopen, run

    all_ok = True
    for directory in configs:
        is_done = False
        try:
            if reopen(directory, world):
                launched.lead(directory)
                run(directory)
            is_done = True
        except SystemExit:  # the reason has been printed
            if world:
                raise
        finally:
            all_ok &= _count_ok(_print_results(directory, 1)) == 1 and is_done
    launched.dismiss()
    return int(not all_ok)


def find_micro_batch(directory: Path, shape: str, command: Sequence[str]) -> int:
    """Find the micro-batch of a run with steps of the SLURM job whose script started this process.

    The ranks that the script starts next read it from the record. ``shape`` is the number of nodes, ranks per node and
    GPUs per node, such as ``2x8x8``; ``command`` starts all ranks of a run, and its directory is appended.
    """
    from ptdbench.run import door

    search_path.add_current()
    nodes, ranks, gpus = map(int, shape.split("x"))
    return int(not door.find_micro_batch(directory, Shape(nodes, ranks, gpus, None), command))


def plan(arguments: argparse.Namespace) -> int:
    """Print the plans for a command line; return exit status 0 if a layout fits. Raises ConfigError."""
    from ptdbench import files
    from ptdbench.planning import anchors, plans
    from ptdbench.report import table, virtual

    search_path.add_current()
    overrides = arguments.overrides
    if world := discover(os.environ):
        rule = f"starts its own ranks, and {world.launcher} has started this process"
        raise ConfigError([Problem("plan", " ".join(overrides), rule, f"run it without {world.launcher}")])
    local.check_sockets()
    composed = plans.composed(overrides, compose.source(arguments))
    typed = anchors.read(arguments.anchor, composed.configs)
    anchored = typed if typed or arguments.no_anchor else anchors.cached(composed.configs)
    made = plans.make(composed, overrides, arguments.again, _prepare_to_plan, _run, anchored)
    if arguments.json:
        echo(files.as_text(made.records))
    elif made.records:
        records = table.show_results(made.directory)
        if made.cached:
            echo(f"cached       {plural(made.cached, 'row')} planned earlier (plan --again plans anew)")
        if measure := virtual.measuring(records):
            timed = any(record.predicted.step_seconds for record in records)
            heading = "Measure what may be the fastest" if timed else "No time is predicted: measure those that fit"
            echo(f"{heading}:\n{measure}")
    if made.stopped:
        raise made.stopped
    return int(all(record["status"] != "ok" for record in made.records))


def _prepare_to_plan(configs: Sequence[Config]) -> None:
    """Call :func:`prepare_ranks`; if the tools to build virtual GPUs are missing, no ranks will be started."""
    with suppress(ConfigError):
        prepare_ranks(configs)


def _run(directory: Path) -> None:
    """Execute a run; imports torch only now, as cached plans need no run."""
    from ptdbench.run.door import run

    run(directory)


def _locally(composed: compose.Composed, world: World | None, line: resume.Line) -> Ended:
    """Execute the runs on this machine, or as rank 0 of those that a launcher started."""
    if world:
        settings.enable_expandable_segments(os.environ)  # the checks may use this rank's GPU
    else:
        prepare_ranks(composed.configs)
    with transient(f"checking {plural(len(composed.overrides), 'run')}…", sys.stderr):  # during the imports, too
        from ptdbench.setup import run_spec
        from ptdbench.sweep import requests
        from ptdbench.sweep.execution import Agenda

        runs = requests.specified(composed, world, line.goes_on)
    if line.goes_on and not composed.is_sweep and runs[0].summary:
        run_spec.require_same_shape(line.goes_on, runs[0].summary, runs[0].config.general.reshape)
    directory = hydra_interface.claim(composed, line.goes_on)
    agenda = Agenda.of(composed, runs, directory, line.only)
    try:
        _execute(composed, agenda)
        launched.dismiss()
    finally:
        status = _conclude(agenda)
    return status, directory


def _on_cluster(composed: compose.Composed, cluster: Slurm, line: resume.Line) -> Ended:
    from ptdbench.sweep import requests, submission, watch
    from ptdbench.sweep.execution import Agenda

    options = composed.launcher_options
    runs = requests.of_cluster(composed, line.goes_on)
    if ignored := slurm.ignored_variables(os.environ):
        echo(f"ignored: {' '.join(ignored)}; the resources of a job are set in the group cluster", sys.stderr)
    submission.check_path(composed.directory)
    missing = _missing(composed, runs, line)
    if not missing:
        echo("nothing to submit: everything is ok, or still in the queue")
    if cluster.submit == "test":
        return submission.show_test_only(missing, options), None
    submission.require_accepted(missing, options)
    directory = hydra_interface.claim(composed, line.goes_on).resolve()  # a job may start elsewhere
    queued = _queued(directory, line)
    agenda = Agenda.of(composed, runs, directory, line.only, queued)
    if queued:
        names = ", ".join(sorted(queued))
        echo(f"{plural(len(queued), 'run')} still in the queue, not submitted again: {names}", sys.stderr)
    _execute(composed, agenda)
    if cluster.submit == "detach":
        return submission.report_refused(agenda.refused) or int(bool(agenda.skipped)), directory
    try:
        if not agenda.is_open:  # a search has already followed its batches
            store.unlock(directory)  # it may be resumed beside this process, which submits nothing more
            watch.follow(directory)
    finally:
        status = _conclude(agenda)
    return status, directory


def _missing(composed: compose.Composed, runs: Sequence[Run], line: resume.Line) -> Sequence[Run]:
    """Return the refused runs, and one for each alternative with a repeat to execute; in a new sweep that is all."""
    from ptdbench.sweep.execution import Agenda

    missing = set(range(len(runs)))
    if line.goes_on and not composed.searches:
        agenda = Agenda.of(composed, runs, line.goes_on, line.only, _queued(line.goes_on, line))
        missing = set(agenda.to_do(missing))
    needed = {run.alternative: run for run in reversed(runs) if run.refused or run.number in missing}
    return [*needed.values()][::-1]


def _queued(directory: Path, line: resume.Line) -> frozenset[str]:
    """Return the runs of a resumed sweep whose jobs have not ended, and will execute them."""
    from ptdbench.sweep import status

    if not line.goes_on or not store.run_directories(directory):
        return frozenset()
    sweep = status.settle(directory)
    if sweep.silence:
        rule = f"SLURM does not say which of its jobs still run: {sweep.silence}"
        raise ConfigError([Problem(resume.SWEEP, directory, rule, "try again when it answers")])
    return frozenset(run.directory for run in sweep.runs if run.queue and not run.queue.is_over)


def _execute(composed: compose.Composed, agenda: Agenda) -> None:
    from ptdbench.sweep import execution

    try:
        if composed.is_sweep:  # as it was typed, so that it can be resumed
            with composed.source.open():
                hydra_interface.write_multirun(composed.sweep(), agenda.directory)
        (execution.search if composed.searches else execution.run_all)(agenda, composed)
    except OSError as error:
        rule = f"{error.filename or 'what belongs there'} cannot be written: {error.strerror or error}"
        remedy = f"free some space, and continue with {resume.command(agenda.directory)}"
        raise ConfigError([Problem("directory", agenda.directory, rule, remedy)]) from None


def _conclude(agenda: Agenda) -> int:
    """Print the results of the runs; return exit status 0 if all requested runs are ok, and none was skipped."""
    requested = 0 if agenda.is_open else len(agenda.runs)
    records = _print_results(agenda.directory, requested)
    if agenda.only:  # the sweep's other runs were not requested
        records = [record for record in records if Path(record.directory) == agenda.directory / agenda.only]
        requested = 0
    return int(bool(agenda.skipped) or _count_ok(records) < (requested or max(1, len(records))))


def _count_ok(records: Sequence[RunRecord]) -> int:
    return sum(record.status == "ok" for record in records)


def prepare_ranks(configs: Sequence[Config]) -> None:
    """Have the fork server import what the ranks of these runs need, in the background.

    Third-party modules are left out: importing them might touch the GPU. The dynamic linker's variables, for virtual
    GPUs, are those of the first run.

    Raises:
        ConfigError: The server cannot be started, or what the ranks need cannot be built.
    """
    from ptdbench.setup import choices

    groups = [node for read in configs for node in read.resolved.values() if isinstance(node, dict)]
    targets = {str(group.get("_target_")) for group in groups}
    chosen = {target.rpartition(".")[0] for target in targets if target.startswith("ptdbench.")}
    event_files = EVENT_FILES if "ptdbench.workloads.train" in chosen else ()
    machine = None
    with suppress(ConfigError):  # reported later, together with all other problems
        machine = choices.virtual(configs[0])
    loading = Place(environ=machine.environment(1)).loading if machine else {}
    kernels = ("ptdbench.kernels.triton_imports",) if machine else ()
    local.warm_up(["ptdbench.rank_imports", *sorted(chosen), *event_files, *kernels], loading)


def _print_results(directory: Path, requested: int) -> list[RunRecord]:
    """Print the table of results, and how to resume if fewer runs than ``requested`` ended; return the records."""
    from ptdbench.report import table

    records = table.show_results(directory)
    if sum(record.status in DONE for record in records) < requested and _needs_resume_hint(directory, records):
        started = records[0].start_command if records else ""
        echo(f"resume       {resume.command(directory, started=started)}")
    return records


def _needs_resume_hint(directory: Path, records: Sequence[RunRecord]) -> bool:
    """Return whether to print how to resume: for an incomplete sweep, or a run whose error does not already say so."""
    from ptdbench.checkpoints import checkpoint_dir

    if store.is_sweep(directory) or not records:
        return store.is_sweep(directory)
    (only,) = records
    return "resume=" not in only.error.message and checkpoint_dir.latest_manifest(directory) is not None
