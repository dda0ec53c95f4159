"""Execution of a sweep's runs: in this process, in one process after the other, or by SLURM.

The runs are those of the command line, or those that one of Hydra's sweepers chooses by the results of earlier ones.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins import ptdbench_launcher
from ptdbench.launch import local, settings
from ptdbench.launch.world import is_first_rank
from ptdbench.problems import ConfigError, Problem, first_line
from ptdbench.records import record, store
from ptdbench.report.remarks import reason
from ptdbench.setup import hydra_output
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, as_written, quoted
from ptdbench.setup.compose import Composed
from ptdbench.sweep import requests
from ptdbench.sweep.agenda import Agenda, Opened
from ptdbench.terminal import echo

#: Executes runs, each of which is opened when the iterator reaches it.
Executor = Callable[[Iterable[Opened]], None]

_YEAR_MINUTES = 60 * 24 * 365


def run_all(agenda: Agenda, composed: Composed) -> None:
    """Execute a sweep whose runs are known in advance, batch by batch, until the stopping rule ends it."""
    execute = executor(agenda, composed)
    for numbers in agenda.batches(composed.first.hydra.sweeper.get("max_batch_size")):
        if agenda.is_settled(numbers[0]):
            return
        agenda.eta.to_come = agenda.to_do(numbers)
        execute(opened(agenda, numbers))


def opened(agenda: Agenda, numbers: Iterable[int]) -> Iterator[Opened]:
    """Open these runs lazily, without those that must not be executed."""
    return (run for number in numbers if (run := agenda.open(number)))


def executor(agenda: Agenda, composed: Composed) -> Executor:
    """Return the executor that the command line's ``hydra/launcher`` selects."""
    if composed.launcher == "submitit_slurm":
        return _BySlurm(agenda, composed.first.hydra.launcher)
    if composed.launcher == "submitit_local":
        return lambda runs: _in_processes(agenda.directory, list(runs))
    return lambda runs: _here(agenda, runs)


def _here(agenda: Agenda, runs: Iterable[Opened]) -> None:
    """Execute runs in this process; report failures at once, as the table comes only after the last run."""
    from ptdbench.run import run

    for one in runs:
        directory = agenda.directory / one.subdirectory
        heading, started = agenda.eta.heading(one.number), time.monotonic()
        with settings.added(one.request.environment):
            run(directory, one.request.config, one.request.summary, heading)
        if is_first_rank(os.environ):
            written = store.load_record(directory)
            agenda.eta.ended(one.number, time.monotonic() - started, written)
            if written["status"] != "ok":
                echo(f"{heading}: {reason(written)}", sys.stderr)


def _in_processes(directory: Path, runs: Sequence[Opened]) -> None:
    """Execute runs one after the other, each in a process of submitit's that starts its own ranks.

    Raises Stopped after a stop signal, when the run that it was forwarded to has ended by itself.
    """
    import submitit

    from ptdbench.sweep import submission, watch

    submitter = submitit.AutoExecutor(folder=str(directory / "logs" / "%j"), cluster="local")
    # Otherwise its controller hides all GPUs, and on Ctrl-C kills the run after a second, before it has saved. With the
    # last line any shell stays its parent, by whose number it is known.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shows = "unset CUDA_VISIBLE_DEVICES" if visible is None else f"export CUDA_VISIBLE_DEVICES={shlex.quote(visible)}"
    setup = {"local_setup": [shows, "trap '' HUP INT QUIT", "trap : EXIT"]}
    submitter.update_parameters(timeout_min=_YEAR_MINUTES, tasks_per_node=1, gpus_per_node=0, **setup)
    for run in runs:
        echo(f"{run.number} {run.request.config.label}: started", sys.stderr)
        place = directory / run.subdirectory
        noted: list[int] = []
        with local.handling(lambda number, _, noted=noted: noted.append(number)):  # type: ignore[misc]
            submitted = submitter.submit(submission.carry_out, *submission.call_of(directory, run))
            passed_on = 0
            while not submitted.done():
                # Until it has opened its record, the run may not hear it yet.
                if len(noted) > passed_on or (noted and not (store.earlier_record(place) or {}).get("owner")):
                    passed_on = len(noted)
                    _terminate(int(submitted.job_id))
                time.sleep(1.0 if noted else 0.1)
        watch.settle(directory, run.subdirectory, str(submitted.paths.stderr))
        if noted:
            raise local.Stopped(noted[0])


def _terminate(shell: int) -> None:
    """Send SIGTERM to the controller in submitit's shell, which forwards it to the run."""
    with suppress(psutil.Error):
        for child in psutil.Process(shell).children():
            child.terminate()


class _BySlurm:
    """Submits runs as SLURM jobs; if later runs depend on their results, it follows the jobs until they end."""

    def __init__(self, agenda: Agenda, options: Mapping[str, object]) -> None:
        self._agenda, self._options = agenda, options
        self._told: set[str] = set()  # runs that have been shown completely

    def __call__(self, runs: Iterable[Opened]) -> None:
        from ptdbench.sweep import submission, watch

        submitted = submission.submit(self._agenda.directory, list(runs), self._options)
        if submitted:
            watch.announce(self._agenda.directory, submitted)
        if self._agenda.is_open and (submitted or self._agenda.queued - self._told):
            self._told = watch.follow(self._agenda.directory, self._told)


class NoObjective(Exception):
    """A run of a search has no value of the objective."""


def search(agenda: Agenda, composed: Composed) -> None:
    """Let the sweeper choose runs until it is done: execute each batch, and report the objectives to the sweeper.

    Raises:
        ConfigError: The sweeper failed, or a run that it chose cannot be composed or submitted.
    """
    execute = executor(agenda, composed)
    with composed.source.open():
        loader = GlobalHydra.instance().config_loader()
        own = [f"{LAUNCHER}={ptdbench_launcher.NAME}", f"hydra.sweep.dir={quoted(str(agenda.directory))}"]
        sweep = composed.sweep(instead=own)
        hydra_output.write_multirun(composed.sweep(), agenda.directory)  # as it was typed, so that it can be resumed

        def carry_out(job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
            for words in job_overrides:
                try:
                    whole = loader.load_sweep_config(sweep, list(words))
                except (HydraException, OmegaConfBaseException) as error:
                    rule = first_line(error)
                    raise ConfigError([Problem("command line", " ".join(words), rule)]) from None
                agenda.requests.append(requests.of_search(whole, words))
            numbers = range(first, first + len(job_overrides))
            execute(opened(agenda, numbers))
            return [_outcome(agenda, number) for number in numbers]

        Plugins.instance().register(ptdbench_launcher.HandOver)
        try:
            context = HydraContext(loader, None)  # type: ignore[arg-type]  # Hydra calls no callbacks here
            sweeper = Plugins.instance().instantiate_sweeper(
                config=sweep,
                hydra_context=context,
                task_function=carry_out,  # type: ignore[arg-type]
            )
            sweeper.sweep(arguments=as_written(sweep.hydra.overrides.task))
        except (ConfigError, OSError):
            raise
        except Exception as error:
            name = composed.first.hydra.runtime.choices[SWEEPER]
            raise ConfigError([Problem(SWEEPER, name, f"ended early: {' '.join(str(error).split())}")]) from error


def _outcome(agenda: Agenda, number: int) -> JobReturn:
    """Return, for the sweeper, the objective in a run's record, or why it has none."""
    words, directory = agenda.requests[number].overrides, agenda.directory / agenda.subdirectory(number)
    written = store.load_record(directory)
    wanted = record.option(written, "objective", str)
    if (value := record.objective_value(written, wanted)) is not None:
        return JobReturn(words, status=JobStatus.COMPLETED, _return_value=value)
    error = NoObjective(f"{directory.name}: {written['status']}, so that it has no {wanted}")
    return JobReturn(words, status=JobStatus.FAILED, _return_value=error)
