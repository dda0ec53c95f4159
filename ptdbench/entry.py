"""``python train.py`` and ``ptdbench train``: what is checked before anything starts, and what is printed at the end.

Nothing here imports torch before the command line has been parsed, so that ``--help`` and misspelled options are
answered at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ptdbench import search_path
from ptdbench.comparison import alternatives, noise
from ptdbench.launch import forced_exit, local, settings, slurm
from ptdbench.launch.world import REFUSED_WAIT, Place, World, discover, is_first_rank
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import schema, store
from ptdbench.records.record import DONE, how_started
from ptdbench.records.schema import Written
from ptdbench.report import table, text
from ptdbench.setup import commandline, compose, hydra_options, hydra_output, resume
from ptdbench.setup.config import Config, Slurm
from ptdbench.sweep import blocks
from ptdbench.terminal import echo, plural, transient

if TYPE_CHECKING:
    from ptdbench.sweep.agenda import Agenda
    from ptdbench.sweep.requests import Request

#: REFUSED_WAIT in a SLURM step, in seconds: srun does not end the waiting ranks, so a refused command takes this much
#: longer.
REFUSED_WAIT_IN_STEP = 5.0

#: The modules with which rank 0 of a training run writes TensorBoard files.
EVENT_FILES = ("torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata")


def main() -> NoReturn:
    """Execute the command line; never returns.

    Exit status 0: every run was ok. 1: a run was not, or the command line was invalid. ``128 + n``: signal ``n``.
    """
    exit_with(_main)


def exit_with(work: Callable[[], int]) -> NoReturn:
    """Call ``work``, which executes runs, and exit with its status, or with the status of the signal or error."""
    try:
        local.stop_on_signals()
        if discover(os.environ) is None:
            settings.defer_sanitizer(os.environ)
        sys.exit(work())
    except (ConfigError, store.Damaged) as error:
        if is_first_rank(os.environ) or type(error) is not ConfigError:  # perhaps only this rank knows it
            echo(str(error), sys.stderr)
        else:  # wait while rank 0 reports it
            with suppress(local.Stopped, ConfigError):  # the refusal may be of the environment itself
                world = discover(os.environ)
                time.sleep(REFUSED_WAIT_IN_STEP if world and world.started_by.has_step else REFUSED_WAIT)
        sys.exit(1)
    except local.Stopped as stop:
        echo(str(stop), sys.stderr)
        sys.exit(128 + stop.signal)
    finally:
        forced_exit.exit_soon()


def _main() -> int:
    arguments = commandline.parse()
    conf = Path(arguments.config_path).resolve() if arguments.config_path else compose.conf_folder()
    if arguments.hydra_help or arguments.shell_completion:
        return hydra_output.shown_by_hydra(arguments, conf)
    search_path.add_current()
    words = commandline.imply(arguments)
    config_name = arguments.config_name or "config"
    line = resume.read(words, arguments.multirun, discover(os.environ), config_name)
    source = compose.Source(conf, config_name, arguments.config_dir)
    composed = compose.compose_all(line.overrides, arguments.multirun, source)
    resume.check_targets(words, composed.configs)
    if arguments.cfg or arguments.help or arguments.info:
        if not is_first_rank(os.environ):
            return 0
        if arguments.cfg:
            return hydra_output.show_configs(arguments, composed)
        return hydra_output.shown_by_hydra(arguments, conf)

    world = discover(os.environ)
    hydra_options.check(composed, world, line.goes_on)
    blocks.check(composed, world, line.goes_on)
    cluster = composed.configs[0].cluster  # the same for all jobs, except for their shape
    return _on_cluster(composed, cluster, line) if isinstance(cluster, Slurm) else _here(composed, world, line)


def carry_out(directories: Sequence[Path]) -> int:
    """Execute the runs of directories, one after the other; return the exit status.

    A run that another process is executing, or whose record cannot be written, counts as not ok; the others continue.

    Raises:
        ConfigError: One of them is not a run that can be executed from here.
    """
    search_path.add_current()
    world = discover(os.environ)
    unique = {directory.resolve(): directory for directory in directories}
    configs = {directory: resume.startable(directory, world) for directory in unique.values()}
    if world is None:
        prepare_ranks([*configs.values()])

    from ptdbench.run import run

    all_ok = True
    for directory, read in configs.items():
        is_done = False
        try:
            with settings.added(hydra_output.recorded_environment(directory)):
                run(directory, read)
            is_done = True
        except SystemExit:  # the reason has been printed
            if world:
                raise
        finally:
            if world is None or world.rank == 0:
                all_ok &= _count_ok(_print_results(directory, [], 1)) == 1 and is_done
    return int(not all_ok)


def plan(overrides: Sequence[str], config_dir: Path | None, as_json: bool, again: bool) -> int:
    """Print the plans for a command line; return exit status 0 if a layout fits.

    Raises:
        ConfigError: The command line is invalid.
    """
    from ptdbench import files
    from ptdbench.planning import plans

    search_path.add_current()
    if world := discover(os.environ):
        rule = f"starts its own ranks, and {world.launcher} has started this process"
        raise ConfigError([Problem("plan", " ".join(overrides), rule, f"run it without {world.launcher}")])
    local.check_sockets()
    local.check_address_space()
    composed = plans.composed(overrides, config_dir)
    made = plans.make(composed, overrides, again, _prepare_to_plan, _run)
    if as_json:
        echo(files.as_text(made.records))
    elif made.records:
        text.show(table.of_plans(made.records, shutil.get_terminal_size((110, 24)).columns))
        if made.cached:
            echo(f"cached: {plural(made.cached, 'row')} planned earlier (plan --again plans anew)")
        echo(table.closing_lines(made.directory, made.records))
    if made.stopped:
        raise made.stopped
    return int(all(one["status"] != "ok" for one in made.records))


def _prepare_to_plan(configs: Sequence[Config]) -> None:
    """Call :func:`prepare_ranks`; if the tools to build virtual GPUs are missing, no ranks will be started."""
    with suppress(ConfigError):
        prepare_ranks(configs)


def _run(*run_of: Any) -> None:
    """Execute a run; imports torch only now, as cached plans need no run."""
    from ptdbench.run import run

    run(*run_of)


def _here(composed: compose.Composed, world: World | None, line: resume.Line) -> int:
    """Execute the runs on this machine, or as a rank that a launcher started; return the exit status."""
    if world:
        local.check_address_space()
    else:
        prepare_ranks(composed.configs)
    shows, checking = world is None or world.rank == 0, f"checking {plural(len(composed.overrides), 'run')}…"
    try:
        with transient(checking, sys.stderr if shows else None):  # shown during the imports, too
            from ptdbench.launch import devices, rendezvous
            from ptdbench.setup import run_spec
            from ptdbench.sweep import requests
            from ptdbench.sweep.agenda import Agenda

            if world:
                for read in composed.configs:
                    devices.check(world, str(read.resolved.get("device")), str(read.resolved.get("backend")))
            runs = requests.of_machine(composed, world, line.goes_on)
        if line.goes_on and not composed.is_sweep and shows and runs[0].summary:
            run_spec.require_same_shape(line.goes_on, runs[0].summary, runs[0].config.general.reshape)
    except ConfigError as refused:
        if world:  # ranks that are not refused would wait for this one
            with suppress(rendezvous.NotMet):
                rendezvous.agree(hydra_output.DIRECTORY, world, str, refused)
        raise
    directory = hydra_output.claim(composed, world, line.goes_on)
    agenda = Agenda.of(composed, runs, directory, line.only) if composed.is_sweep else None
    status = 0
    try:
        _carry_out(composed, directory, agenda, runs)
    finally:
        if shows:
            status = _conclude(composed, directory, agenda)
    return status


def _on_cluster(composed: compose.Composed, cluster: Slurm, line: resume.Line) -> int:
    """Submit the runs to SLURM as jobs; return the exit status."""
    from ptdbench.sweep import requests, submission, watch
    from ptdbench.sweep.agenda import Agenda

    options = composed.first.hydra.launcher
    runs = requests.of_cluster(composed, line.goes_on)
    if ignored := slurm.ignored_variables(os.environ):
        echo(f"ignored: {' '.join(ignored)}; the resources of a job are set in the group cluster", sys.stderr)
    submission.check_paths(runs, Path(composed.first.hydra.sweep.dir))
    missing = _missing(composed, runs, line)
    if not missing:
        echo("nothing to submit: everything is ok, or still in the queue")
    if cluster.submit == "test":
        return submission.show_test_only(missing, options)
    batch = composed.first.hydra.sweeper.get("max_batch_size") if not runs[0].config.sweep.same_nodes else None
    for first in range(0, len(missing), batch or len(runs)):
        submission.require_accepted(missing[first : first + (batch or len(runs))], options)
    submission.make_folders(runs)
    directory = hydra_output.claim(composed, None, line.goes_on).resolve()  # a job may start elsewhere
    queued = _queued(directory, line)
    agenda = Agenda.of(composed, runs, directory, line.only, queued)
    if queued:
        names = ", ".join(sorted(queued))
        echo(f"{plural(len(queued), 'run')} still in the queue, not submitted again: {names}", sys.stderr)
    _carry_out(composed, directory, agenda, runs)
    if cluster.submit == "detach":
        return submission.report_refused(agenda.refused) or int(bool(agenda.skipped))
    try:
        if not agenda.is_open:  # a search has already followed its batches
            store.unlock(directory)  # it may be resumed beside this process, which submits nothing more
            watch.follow(directory)
    finally:
        status = _conclude(composed, directory, agenda)
    return status


def _missing(composed: compose.Composed, runs: Sequence[Request], line: resume.Line) -> Sequence[Request]:
    """Return the runs of which a resumed sweep lacks a repeat, and refused ones; all of a search or a new sweep."""
    from ptdbench.sweep.agenda import Agenda

    if not line.goes_on or composed.searches:
        return runs
    agenda = Agenda.of(composed, runs, line.goes_on, line.only, _queued(line.goes_on, line))
    places = [place for place, _ in blocks.order(len(runs), runs[0].config.repeat)]
    missing = {places[number] for number in agenda.to_do(range(len(places)))}
    return [run for place, run in enumerate(runs) if run.refused or place in missing]


def _queued(directory: Path, line: resume.Line) -> frozenset[str]:
    """Return the runs of a resumed sweep whose jobs have not ended: each is left to its job."""
    from ptdbench.sweep import status

    if not line.goes_on or not store.holding(directory, store.RECORD):
        return frozenset()
    sweep = status.look(directory)
    if sweep.silence:
        rule = f"SLURM does not say which of its jobs still run: {sweep.silence}"
        raise ConfigError([Problem(resume.SWEEP, directory, rule, "try again when it answers")])
    return frozenset(run.directory for run in sweep.runs if run.queue and not run.queue.is_over)


def _carry_out(composed: compose.Composed, directory: Path, agenda: Agenda | None, runs: Sequence[Request]) -> None:
    """Execute the run, search or sweep that was requested."""
    from ptdbench.run import run
    from ptdbench.sweep import execution

    writes = is_first_rank(os.environ)
    try:
        if agenda is None:
            (only,) = runs
            if writes:
                hydra_output.write_files(only.job(None, None), directory)
            with settings.added(only.environment):
                run(directory, only.config, only.summary)
        elif composed.searches:
            execution.search(agenda, composed)
        else:
            if writes:
                with composed.source.open():
                    hydra_output.write_multirun(composed.sweep(), directory)
            execution.run_all(agenda, composed)
    except OSError as error:
        rule = f"{error.filename or 'what belongs there'} cannot be written: {error.strerror or error}"
        remedy = f"free some space, and continue with {resume.command(directory)}"
        raise ConfigError([Problem("directory", directory, rule, remedy)]) from None


def _conclude(composed: compose.Composed, directory: Path, agenda: Agenda | None) -> int:
    """Print the results of the runs; return exit status 0 if all requested runs are ok, and none was skipped."""
    asked = len(agenda.requests) if agenda and not agenda.is_open else int(agenda is None)
    records = _print_results(directory, composed.configs, asked)
    if agenda and agenda.only:  # the sweep's other runs were not requested
        records = [record for record in records if store.below(directory, record["directory"]) == agenda.only]
        asked = 0
    return int(bool(agenda and agenda.skipped) or _count_ok(records) < (asked or max(1, len(records))))


def _count_ok(records: Sequence[Written]) -> int:
    return sum(record["status"] == "ok" for record in records)


def prepare_ranks(configs: Sequence[Config]) -> None:
    """Have the fork server import what the ranks of these runs need, in the background.

    Third-party modules are left out: importing them might touch the GPU. The dynamic linker's variables, for virtual
    GPUs, are those of the first run.

    Raises:
        ConfigError: The server cannot be started, or what the ranks need cannot be built.
    """
    from ptdbench.setup import choices

    local.check_address_space()
    groups = [node for read in configs for node in read.resolved.values() if isinstance(node, dict)]
    targets = {str(group.get("_target_")) for group in groups}
    chosen = {target.rpartition(".")[0] for target in targets if target.startswith("ptdbench.")}
    event_files = EVENT_FILES if "ptdbench.workloads.train" in chosen else ()
    machine = None
    with suppress(ConfigError):  # reported later, together with all other problems
        machine = choices.virtual(configs[0])
    loading = Place(environ=machine.environment(1)).loading if machine else {}
    local.warm_up(["ptdbench.rank_imports", *sorted(chosen), *event_files], loading)


def _print_results(directory: Path, typed: Sequence[Config], asked: int) -> list[dict[str, Any]]:
    """Print the table of results; nothing if a signal arrived before the first run began.

    Workloads on the command line, third-party ones included, may show their own results.
    """
    if store.is_sweep(directory):
        records = store.read_results(directory, lambda damage: echo(damage, sys.stderr))
    else:
        records = [store.load_record(directory)] if (directory / store.RECORD).exists() else []
    if records:
        noise.keep(alternatives.group(records))
        workloads = {str(read.resolved["workload"].get("_target_")) for read in typed}
        text.show(table.render(records, shutil.get_terminal_size((110, 24)).columns, workloads))
        echo(table.closing_lines(directory, records))
    if sum(record["status"] in DONE for record in records) < asked and _needs_resume_hint(directory, records):
        started = how_started(records[0]) if records else ""
        echo(f"resume       {resume.command(directory, started=started)}")
    return records


def _needs_resume_hint(directory: Path, records: Sequence[Written]) -> bool:
    """Return whether to print how to resume: for an incomplete sweep, or a run whose error does not already say so."""
    from ptdbench.checkpoints import checkpoint_dir

    if store.is_sweep(directory) or not records:
        return store.is_sweep(directory)
    (only,) = records
    return "resume=" not in schema.error(only).message and checkpoint_dir.latest_manifest(directory) is not None
