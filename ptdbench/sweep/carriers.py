"""The runs of a sweep, handed to what carries them out: this process, one process after the other, or SLURM.

They are those of the command line, or those that one of Hydra's sweepers chooses by the results of earlier ones.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins import ptdbench_launcher
from ptdbench.launch import settings
from ptdbench.launch.world import is_first_rank
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import record, store
from ptdbench.report.remarks import reason
from ptdbench.setup import hydra_options, hydra_output
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, quoted
from ptdbench.setup.compose import Composed
from ptdbench.sweep import requests
from ptdbench.sweep.agenda import Agenda, Opened
from ptdbench.terminal import echo

#: Carries out runs, each of which is opened when it is asked for.
Carrier = Callable[[Iterable[Opened]], None]

_YEAR_MINUTES = 60 * 24 * 365


def all_of(agenda: Agenda, composed: Composed) -> None:
    """Carry out the runs of a sweep whose runs are known, batch by batch, unless enough is known of all."""
    carry = carrier(agenda, composed)
    for numbers in agenda.batches(composed.first.hydra.sweeper.get("max_batch_size")):
        if agenda.is_settled(numbers[0]):
            return
        agenda.eta.expect(agenda.to_do(numbers))
        carry(opened(agenda, numbers))


def opened(agenda: Agenda, numbers: Iterable[int]) -> Iterator[Opened]:
    """These runs, without those that are not to be carried out."""
    return (run for number in numbers if (run := agenda.open(number)))


def carrier(agenda: Agenda, composed: Composed) -> Carrier:
    """Return the command line's choice of ``hydra/launcher``."""
    if composed.launcher == "submitit_slurm":
        return _BySlurm(agenda, composed.first.hydra.launcher)
    if composed.launcher == "submitit_local":
        return lambda runs: _in_processes(agenda.directory, list(runs))
    return lambda runs: _here(agenda, runs)


def _here(agenda: Agenda, runs: Iterable[Opened]) -> None:
    """In this process; a run that fails says so, as the table comes only when all have ended."""
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
    """One after the other, each in a process of its own that starts its ranks itself."""
    import submitit

    from ptdbench.sweep import watch
    from ptdbench.sweep.submission import call_of, carry_out

    executor = submitit.AutoExecutor(folder=str(directory / "logs" / "%j"), cluster="local")
    executor.update_parameters(timeout_min=_YEAR_MINUTES, tasks_per_node=1, gpus_per_node=0)
    for run in runs:
        echo(f"{run.number} {run.request.config.label}: started", sys.stderr)
        # submitit hides every GPU that it was not asked for.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        submitted = executor.submit(carry_out, *call_of(directory, run, CUDA_VISIBLE_DEVICES=visible))
        try:
            submitted.wait()
        except BaseException:
            submitted.cancel()
            submitted.wait()
            raise
        finally:
            watch.settle(directory, run.subdirectory, str(submitted.paths.stderr))


class _BySlurm:
    """Jobs of a cluster: where what comes next depends on them, they are followed to their end."""

    def __init__(self, agenda: Agenda, options: Mapping[str, object]) -> None:
        self._agenda, self._options = agenda, options
        self._told: set[str] = set()  # of which runs all has been shown

    def __call__(self, runs: Iterable[Opened]) -> None:
        from ptdbench.sweep import submission, watch

        submitted = submission.submit(self._agenda.directory, list(runs), self._options)
        if submitted:
            watch.announce(self._agenda.directory, submitted)
        if self._agenda.is_open and (submitted or self._agenda.queued - self._told):
            self._told = watch.follow(self._agenda.directory, self._told)


class NoObjective(Exception):
    """A run of a search that came to nothing."""


def search(agenda: Agenda, composed: Composed) -> None:
    """Let the sweeper choose runs until it has done; each of its batches is carried out, and it is told the objectives.

    Raises:
        ConfigError: The sweeper failed, or a run that it chose cannot be composed or submitted.
    """
    carry = carrier(agenda, composed)
    with composed.source.open():
        loader = GlobalHydra.instance().config_loader()
        own = [
            f"{LAUNCHER}={ptdbench_launcher.NAME}",
            f"hydra.sweep.dir={quoted(str(agenda.directory))}",
            *hydra_options.search_overrides(composed),
        ]
        sweep = composed.sweep(instead=own)
        hydra_output.write_multirun(composed.sweep(), agenda.directory)  # as it was typed: it may go on

        def carry_out(job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
            for words in job_overrides:
                try:
                    whole = loader.load_sweep_config(sweep, list(words))
                except (HydraException, OmegaConfBaseException) as error:
                    rule = str(error).partition("\n")[0]
                    raise ConfigError([Problem("command line", " ".join(words), rule)]) from None
                agenda.requests.append(requests.of_search(whole, words))
            numbers = range(first, first + len(job_overrides))
            carry(opened(agenda, numbers))
            return [_outcome(agenda, number) for number in numbers]

        Plugins.instance().register(ptdbench_launcher.HandOver)
        try:
            context = HydraContext(loader, None)  # type: ignore[arg-type]  # nothing of Hydra's calls back
            sweeper = Plugins.instance().instantiate_sweeper(
                config=sweep,
                hydra_context=context,
                task_function=carry_out,  # type: ignore[arg-type]
            )
            sweeper.sweep(arguments=list(sweep.hydra.overrides.task))
        except (ConfigError, OSError):
            raise
        except Exception as error:
            name = composed.first.hydra.runtime.choices[SWEEPER]
            raise ConfigError([Problem(SWEEPER, name, f"ended early: {' '.join(str(error).split())}")]) from error


def _outcome(agenda: Agenda, number: int) -> JobReturn:
    """Tell the sweeper the objective of a run's record, or why it has none."""
    words, directory = agenda.requests[number].overrides, agenda.directory / agenda.subdirectory(number)
    written = store.load_record(directory)
    wanted = record.option(written, "objective", str)
    if (value := record.objective_value(written, wanted)) is not None:
        return JobReturn(words, status=JobStatus.COMPLETED, _return_value=value)
    error = NoObjective(f"{directory.name}: {written['status']}, so that it has no {wanted}")
    return JobReturn(words, status=JobStatus.FAILED, _return_value=error)
