"""Following a sweep that is on the cluster, until its last run has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ptdbench.records import ledger, record
from ptdbench.report.reason import OUTPUT
from ptdbench.report.text import cropped
from ptdbench.sweep import output, status, view
from ptdbench.sweep.status import Run, Sweep
from ptdbench.terminal import command, plain, plural, say

#: Seconds between two looks at the queue: soon while a person waits for the first job, rarer later, out of courtesy.
FIRST, LATER = 1.0, 10.0

#: Lines of a table that are no rows: two of headings, one below, and one for the cursor.
_AROUND_THE_ROWS = 4


def announce(sweep_directory: Path, jobs: Sequence[ledger.Job]) -> None:
    """Say what was submitted, and how to follow it and end it from any shell."""
    ids = list(dict.fromkeys(job.id for job in jobs if job.id))
    arrays = list(dict.fromkeys(identity.partition("_")[0] for identity in ids))
    what = plural(len(ids), "job") + (f" with {plural(len(jobs), 'run')}" if len(jobs) > len(ids) else "")
    say(f"submitted {what}: {' '.join(ids[:20])}{' ...' * (len(ids) > 20)}")
    say(f"status     {command('status')} {sweep_directory}")
    say(f"cancel     scancel {' '.join(arrays)}")
    say(f"output     {sweep_directory}/logs")


def follow(sweep_directory: Path, told: Collection[str] = ()) -> set[str]:
    """Show how the jobs of a sweep are doing until all have ended; a signal leaves them to themselves.

    Args:
        sweep_directory: The sweep's directory.
        told: Directories of runs of which all has been shown already.

    Returns:
        The directories of all runs of which all has been shown.
    """
    console = Console(stderr=True)
    show = _Table(console) if console.is_terminal else _Lines()
    started = time.monotonic()
    try:
        with show:
            while True:
                sweep = status.look(sweep_directory)
                sweep = replace(sweep, runs=[run for run in sweep.runs if run.directory not in told])
                show(sweep)
                if sweep.is_over:
                    break
                time.sleep(min(LATER, max(FIRST, (time.monotonic() - started) / 30)))
    except BaseException as error:
        how = f"The jobs go on. Look at them with: {command('status')} {sweep_directory}"
        if isinstance(error, OSError):
            problem = f"{error.filename or sweep_directory}: {error.strerror or error}; make room, and look again"
            say(f"{problem}\n{how}", sys.stderr)
            raise SystemExit(1) from None
        say(how, sys.stderr)
        raise
    for run in sweep.runs:
        _show_failure(sweep_directory, run)
    return {*told, *(run.directory for run in sweep.runs)}


def settle(sweep_directory: Path, subdirectory: str, log: str) -> None:
    """After a job on this machine: if it left no word, say so in its record."""
    written = status.written(sweep_directory / subdirectory)
    if record.is_open(written):
        message = f"the job's process ended without a result{OUTPUT}{log}"
        written = status.conclude(sweep_directory, subdirectory, "Gone", message)
    say(f"{Path(subdirectory).name}: {written['status']}", sys.stderr)
    _show_failure(sweep_directory, Run(subdirectory, None, None, written, is_over=True))


def _show_failure(sweep_directory: Path, run: Run) -> None:
    """The traceback of a run that failed, or the end of its output where it left none."""
    error = run.typed.error
    if run.typed.status == "ok" or not error:
        return
    name = Path(run.directory).name
    if error.traceback:
        say(f"\n{name}, rank {error.rank}:\n{error.traceback.rstrip()}", sys.stderr)
    elif run.job and (tail := output.tail(run.job)):
        say(f"\n{name}, the end of its output:\n{tail}", sys.stderr)


class _Table:
    """A table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, sweep: Sweep) -> None:
        room = max(1, self._console.height - _AROUND_THE_ROWS)
        shown = Sweep(_first_the_open(sweep.runs)[:room])
        hidden = len(sweep.runs) - len(shown.runs)
        below = f"{sum(run.is_over for run in sweep.runs)} of {len(sweep.runs)} have ended"
        if hidden:
            below += f"; {hidden} more are not shown"
        if sweep.silence:
            below += f"; SLURM does not answer: {plain(' '.join(sweep.silence.split()))}"
        lines = [*view.lines(shown, self._console.width), cropped(below, self._console.width)]
        self._live.update(Text("\n".join(lines), no_wrap=True), refresh=True)


class _Lines:
    """A line for every change, for a file or a pipe."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, *_: object) -> None:
        """Nothing to tidy up."""

    def __call__(self, sweep: Sweep) -> None:
        for run in sweep.runs:
            state = view.state(run)
            if self._last.get(run.directory) != state:
                self._last[run.directory] = state
                job = f"job {run.job.id} " if run.job else ""
                say(f"{job}{Path(run.directory).name}: {state}", sys.stderr)


def _first_the_open(runs: Sequence[Run]) -> list[Run]:
    """Where there is not room for all, those that still change."""
    return sorted(runs, key=lambda run: run.is_over)
