"""Execution of a sweep's runs: by this process, or by SLURM."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from ptdbench.launch.world import discover
from ptdbench.records import store
from ptdbench.report.display import headed
from ptdbench.report.remarks import reason
from ptdbench.run import followers
from ptdbench.setup.compose import Composed
from ptdbench.setup.runs import Run
from ptdbench.sweep.agenda import Agenda
from ptdbench.terminal import echo

#: Executes runs, each of which is opened when the iterator reaches it.
Executor = Callable[[Iterable[Run]], None]


def run_all(agenda: Agenda, composed: Composed) -> None:
    """Execute runs, batch by batch, until the stopping rule ends a sweep."""
    execute = executor(agenda, composed)
    for numbers in agenda.batches():
        if agenda.is_settled(numbers[0]):
            return
        agenda.eta.to_come = agenda.to_do(numbers)
        execute(run for number in numbers if (run := agenda.open(number)))  # each when it is reached


def executor(agenda: Agenda, composed: Composed) -> Executor:
    """Return the executor that the command line's ``hydra/launcher`` selects."""
    if composed.launcher == "submitit_slurm":
        return _BySlurm(agenda, composed.launcher_options)
    return lambda runs: _here(agenda, runs)


def _here(agenda: Agenda, runs: Iterable[Run]) -> None:
    """Execute runs in this process, and in the other ranks if a launcher started it.

    Failures are reported at once, as the table comes only after the last run.
    """
    from ptdbench.run.door import run as carry_out

    for run in runs:
        directory, started = agenda.place(run), time.monotonic()
        ranks_warn = discover(os.environ) is not None
        if run.summary and run.summary.warning and not ranks_warn:
            echo(run.summary.warning, sys.stderr)
        followers.lead(directory)
        if run.number is None:
            carry_out(directory)
            continue
        heading = agenda.eta.heading(run.number)
        with headed(heading):
            carry_out(directory)
        ended = store.read_record(directory)
        agenda.eta.ended(run.number, time.monotonic() - started, ended)
        if ended.status != "ok":
            echo(f"{heading}: {reason(ended)}", sys.stderr)


class _BySlurm:
    """Submits runs as SLURM jobs; if later runs depend on their results, it follows the jobs until they end."""

    def __init__(self, agenda: Agenda, options: Mapping[str, object]) -> None:
        self._agenda, self._options = agenda, options
        self._told: set[str] = set()  # runs that have been shown completely

    def __call__(self, runs: Iterable[Run]) -> None:
        from ptdbench.sweep import submission, watch

        submitted = submission.submit(self._agenda.directory, list(runs), self._options)
        if submitted:
            watch.announce(self._agenda.directory, submitted)
        if self._agenda.is_open and (submitted or self._agenda.queued - self._told):
            self._told = watch.follow(self._agenda.directory, self._told)
