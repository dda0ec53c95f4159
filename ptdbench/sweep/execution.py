"""Execution of a sweep's runs: in this process, in one process after the other, or by SLURM.

The runs are those of the command line, or those that one of Hydra's sweepers chooses by the results of earlier ones.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins import ptdbench_launcher
from ptdbench import search_path, terminal
from ptdbench.launch import local
from ptdbench.problems import ConfigError, Problem, first_line
from ptdbench.records import record, store
from ptdbench.report.display import headed
from ptdbench.report.remarks import reason
from ptdbench.run import followers
from ptdbench.setup import hydra_side
from ptdbench.setup import runs as setup_runs
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, as_written, quoted
from ptdbench.setup.compose import Composed
from ptdbench.setup.runs import Run
from ptdbench.sweep import requests
from ptdbench.sweep.agenda import Agenda
from ptdbench.terminal import echo

#: Executes runs, each of which is opened when the iterator reaches it.
Executor = Callable[[Iterable[Run]], None]


def run_all(agenda: Agenda, composed: Composed) -> None:
    """Execute runs that are known in advance, batch by batch, until the stopping rule ends a sweep."""
    execute = executor(agenda, composed)
    for numbers in agenda.batches():
        if agenda.is_settled(numbers[0]):
            return
        agenda.eta.to_come = agenda.to_do(numbers)
        execute(opened(agenda, numbers))


def opened(agenda: Agenda, numbers: Iterable[int]) -> Iterator[Run]:
    """Open these runs lazily, without those that must not be executed."""
    return (run for number in numbers if (run := agenda.open(number)))


def executor(agenda: Agenda, composed: Composed) -> Executor:
    """Return the executor that the command line's ``hydra/launcher`` selects."""
    if composed.launcher == "submitit_slurm":
        return _BySlurm(agenda, composed.launcher_options)
    if composed.launcher == "submitit_local":
        return lambda runs: _in_processes(agenda, list(runs))
    return lambda runs: _in_this_process(agenda, runs)


def _in_this_process(agenda: Agenda, runs: Iterable[Run]) -> None:
    """Execute runs in this process, and in the other ranks if a launcher started it.

    Failures are reported at once, as the table comes only after the last run.
    """
    from ptdbench.run import door

    for run in runs:
        directory, started = agenda.place(run), time.monotonic()
        followers.lead(directory)
        if run.number is None:
            door.run(directory)
            continue
        heading = agenda.eta.heading(run.number)
        with headed(heading):
            door.run(directory)
        ended = store.read_record(directory)
        agenda.eta.ended(run.number, time.monotonic() - started, ended)
        if ended.status != "ok":
            echo(f"{heading}: {reason(ended)}", sys.stderr)


def _in_processes(agenda: Agenda, runs: Sequence[Run]) -> None:
    """Execute runs one after the other, each in a process that starts its own ranks, as the step of a job does.

    Raises Stopped after a stop signal, when the run that it was forwarded to has ended by itself.
    """
    from ptdbench.sweep import watch

    command = [sys.executable, "-u", *search_path.module("ptdbench"), "run"]
    environ = {**os.environ, **terminal.as_variable(sys.argv), **search_path.inherited()}
    for run in runs:
        echo(f"{run.number} {run.config.label}: started", sys.stderr)
        log = agenda.directory / "logs" / str(run.number) / f"{run.number}_0_log.err"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors, log.with_suffix(".out").open("ab") as output:
            words = [*command, str(agenda.place(run).absolute())]
            _, stopped = local.attended(words, env=environ, stdout=output, stderr=errors)
        watch.settle(agenda.directory, run.subdirectory, str(log))
        if stopped:
            raise local.Stopped(stopped)


class _BySlurm:
    """Submits runs as SLURM jobs; if later runs depend on their results, it follows the jobs until they end."""

    def __init__(self, agenda: Agenda, options: Mapping[str, object]) -> None:
        self._agenda, self._options = agenda, options
        self._shown: set[str] = set()  # runs that have been shown completely

    def __call__(self, runs: Iterable[Run]) -> None:
        from ptdbench.sweep import submission, watch

        submitted = submission.submit(self._agenda.directory, list(runs), self._options)
        if submitted:
            watch.announce(self._agenda.directory, submitted)
        if self._agenda.is_open and (submitted or self._agenda.queued - self._shown):
            self._shown = watch.follow(self._agenda.directory, self._shown)


def search(agenda: Agenda, composed: Composed) -> None:
    """Let the sweeper choose runs until it is done: execute each batch, and report the objectives to the sweeper.

    Raises:
        ConfigError: The sweeper failed, or a run that it chose cannot be composed or submitted.
    """
    execute = executor(agenda, composed)
    with composed.source.open():
        loader = GlobalHydra.instance().config_loader()
        handed = [f"{LAUNCHER}={ptdbench_launcher.NAME}", f"hydra.sweep.dir={quoted(str(agenda.directory))}"]
        sweep = composed.sweep(instead=handed)
        hydra_side.write_multirun(composed.sweep(), agenda.directory)  # as it was typed, so that it can be resumed

        def execute_batch(job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
            for words in job_overrides:
                try:
                    whole = loader.load_sweep_config(sweep, list(words))
                except (HydraException, OmegaConfBaseException) as error:
                    rule = first_line(error)
                    raise ConfigError([Problem("command line", " ".join(words), rule)]) from None
                agenda.runs.append(requests.of_search(setup_runs.of_search(composed, whole, words, len(agenda.runs))))
            numbers = range(first, first + len(job_overrides))
            execute(opened(agenda, numbers))
            return [_outcome(agenda, number) for number in numbers]

        Plugins.instance().register(ptdbench_launcher.HandOver)
        try:
            context = HydraContext(loader, None)  # type: ignore[arg-type]  # Hydra calls no callbacks here
            sweeper = Plugins.instance().instantiate_sweeper(
                config=sweep,
                hydra_context=context,
                task_function=execute_batch,  # type: ignore[arg-type]
            )
            sweeper.sweep(arguments=as_written(sweep.hydra.overrides.task))
        except (ConfigError, OSError):
            raise
        except Exception as error:
            rule = f"ended early: {' '.join(str(error).split())}"
            raise ConfigError([Problem(SWEEPER, composed.sweeper, rule)]) from error


def _outcome(agenda: Agenda, number: int) -> JobReturn:
    """Return, for the sweeper, the objective in a run's record, or why it has none."""
    words, directory = agenda.runs[number].overrides, agenda.place(agenda.runs[number])
    ended = store.read_record(directory)
    wanted = ended.option("objective", str)
    if (value := record.objective_value(ended, wanted)) is not None:
        return JobReturn(words, status=JobStatus.COMPLETED, _return_value=value)
    error = ValueError(f"{directory.name}: {ended.status}, so that it has no {wanted}")
    return JobReturn(words, status=JobStatus.FAILED, _return_value=error)
