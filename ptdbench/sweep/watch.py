"""Watching a sweep: the table of a sweep that may still be in progress, and following it until its last run ends."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ptdbench.records import ledger
from ptdbench.report import text
from ptdbench.report.labels import titles
from ptdbench.report.remarks import reason
from ptdbench.report.text import MISSING, Column, cropped, wrap
from ptdbench.setup import resume
from ptdbench.sweep import status
from ptdbench.sweep.status import Run, Sweep
from ptdbench.terminal import command, echo, from_here, plain, plural
from ptdbench.units import three_digits


def numbered(sweep: Sweep) -> list[tuple[int, str, Run]]:
    """Return each run with its number in the sweep, and a name that tells it apart from the others."""
    named = zip(sweep.runs, titles([run.record for run in sweep.runs]), strict=True)
    return [(run.job.number if run.job else place, title, run) for place, (run, title) in enumerate(named)]


def as_json(sweep: Sweep) -> dict[str, object]:
    """Return the sweep as ``status --json`` prints it; docs/results.md describes the keys."""
    return {
        "is_over": sweep.is_over,
        "runs": [_as_json(*row) for row in numbered(sweep)],
        "damage": list(sweep.damage),
        "killed": [resume.command(*entry) for entry in sweep.killed.items()],
        "slurm": sweep.silence or None,
    }


def _as_json(number: int, name: str, run: Run) -> dict[str, object]:
    record, job, going_on = run.record, run.job, None if run.is_over else run.progress
    metrics = record.metrics
    rates = {"samples_per_second": metrics.samples_per_second, "tokens_per_second": metrics.tokens_per_second}
    if going_on:
        rates[f"{going_on.unit}_per_second"] = going_on.per_second
    return {
        "number": number,
        "directory": run.directory,
        "run": name,
        "job": job.id if job else None,
        "queue": run.queue.state if run.queue else None,
        "nodes": record.nodes or None,
        "world_size": record.world_size,
        "kind": record.kind,
        "status": "unfinished" if record.is_open and not run.is_over else record.status,
        "is_over": run.is_over,
        "step": going_on.step if going_on else record.steps,
        "steps": going_on.steps if going_on else record.option("train.steps", int),
        **rates,
        "startup_seconds": metrics.startup_seconds,
        "error": record.written.get("error"),
    }


def reasons(sweep: Sweep) -> Iterator[str]:
    """Yield why runs failed, which results are damaged, and why the queue is not shown."""
    for run in sweep.runs:
        if run.is_over and run.record.error.type:
            yield f"{run.directory}: {reason(run.record)}"
    yield from sweep.damage
    if sweep.silence:
        yield f"SLURM does not answer: {sweep.silence}"


def state_text(run: Run) -> str:
    """Return the state of a run in a few words: while it is in the queue, the queue's, then the record's."""
    record, queue, job = run.record, run.queue, run.job
    if run.is_over:
        status = " ".join(filter(None, (record.kind, record.status)))
        return f"{status} ({record.error.type})" if record.error.type.isupper() else status
    if queue is None:
        return "not submitted" if job and not job.id else "unfinished"
    if queue.state in ("PENDING", "SUSPENDED"):
        return f"{queue.state} ({queue.reason})" if queue.reason else queue.state
    if job and job.step is not None and job.step > 0 and not record.owner:
        return "waits in its job"
    return f"{queue.state} {queue.nodes}".rstrip()


def _shape(run: Run) -> str:
    if run.job:
        return run.job.shape
    nodes, ranks = run.record.nodes, run.record.world_size
    return f"{plural(len(nodes), 'node')}, {plural(ranks, 'rank')}" if nodes and ranks else MISSING


def _step(run: Run) -> str:
    if run.is_over:
        return str(run.record.steps or MISSING)
    if run.progress:
        return f"{run.progress.step}/{run.progress.steps}"
    wanted = run.record.option("train.steps", int)
    return f"{run.record.steps}/{wanted}" if run.record.steps and wanted else MISSING


def _rate(run: Run) -> str:
    if run.is_over or not run.progress:  # what ranks of this machine note in their record is as recent
        tokens, samples = run.record.metrics.tokens_per_second, run.record.metrics.samples_per_second
        rate, unit = (tokens, "tokens") if tokens else (samples, "samples")
    else:
        rate, unit = run.progress.per_second, run.progress.unit
    return f"{three_digits(rate)}{' samples' * (unit == 'samples')}" if rate else MISSING


def _cell(cell: Callable[[Run], str]) -> Callable[[tuple[int, str, Run]], str]:
    """Return a function for the cell of a row, in one line, from one for the cell of a run."""
    return lambda row: _in_one_line(cell(row[2]))


def _in_one_line(cell: str) -> str:
    return plain(" ".join(cell.split()))


#: The columns of a sweep's table, whose rows are :func:`numbered`.
COLUMNS: Sequence[Column[tuple[int, str, Run]]] = (
    Column("#", lambda row: str(row[0])),
    Column("job", _cell(lambda run: (run.job.id or "?") if run.job else MISSING), is_text=True, drop_order=3),
    Column("run", lambda row: _in_one_line(row[1]), is_text=True, min_width=12),
    Column("shape", _cell(_shape), is_text=True, drop_order=1),
    Column("state", _cell(state_text), is_text=True, min_width=12),
    Column("step", _cell(_step), drop_order=4),
    Column("tokens/s", _cell(_rate), drop_order=2),
)


def table_text(sweep: Sweep, width: int | None = None, explains: bool = True) -> str:
    """Return the table as plain text, then omitted columns, reasons and how to resume.

    No line of a run exceeds the width: the least important columns are omitted, and the rest cut; ``None`` is no limit.
    Without ``explains``, reasons are left to another table.
    """
    lines, gone = text.table(COLUMNS, numbered(sweep), width, folds=False)
    below = [*text.left_out(gone, width), *(wrap(line, width) for line in (reasons(sweep) if explains else ()))]
    killed = [f"killed; resume with {resume.command(*entry)}" for entry in sweep.killed.items()]
    return "\n".join([*(cropped(line, width) for line in lines), *below, *killed])


#: Seconds between two queries of the queue: short while the user waits for the first job, later longer to spare SLURM.
FIRST, LATER = 1.0, 10.0


def announce(sweep_directory: Path, jobs: Sequence[ledger.Job]) -> None:
    """Print what was submitted, and how to follow and cancel it from any shell."""
    ids = list(dict.fromkeys(job.id for job in jobs if job.id))
    arrays = list(dict.fromkeys(identity.partition("_")[0] for identity in ids))
    what = plural(len(ids), "job") + (f" with {plural(len(jobs), 'run')}" if len(jobs) > len(ids) else "")
    echo(f"submitted {what}: {' '.join(ids[:20])}{' ...' * (len(ids) > 20)}")
    echo(f"status     {command('status')} {shlex.quote(str(from_here(sweep_directory)))}")
    echo(f"cancel     scancel {' '.join(arrays)}")
    logs = Path(os.path.commonpath([job.log for job in jobs]))
    echo(f"output     {shlex.quote(str(from_here(logs)))}")


def follow(sweep_directory: Path, shown: Collection[str] = ()) -> set[str]:
    """Print each change of a sweep's jobs until all have ended; on a signal, stop printing and leave them running.

    Returns:
        The directories of all runs that have been shown to their end, including those ``shown`` before.
    """
    started, states = time.monotonic(), dict[str, str]()
    try:
        while True:
            sweep = status.settle(sweep_directory)
            sweep = replace(sweep, runs=[run for run in sweep.runs if run.directory not in shown])
            _print_changes(sweep.runs, states)
            if all(run.is_over or (run.queue is None and not sweep.silence) for run in sweep.runs):
                break  # a run without a job makes no further progress
            time.sleep(min(LATER, max(FIRST, (time.monotonic() - started) / 30)))
    except BaseException as error:
        shown = shlex.quote(str(from_here(sweep_directory)))
        hint = f"The jobs keep running. Look at them with: {command('status')} {shown}"
        if isinstance(error, OSError):
            problem = f"{error.filename or sweep_directory}: {error.strerror or error}; free some space, and look again"
            echo(f"{problem}\n{hint}", sys.stderr)
            raise SystemExit(1) from None
        echo(hint, sys.stderr)
        raise
    for run in sweep.runs:
        _show_failure(run)
    return {*shown, *(run.directory for run in sweep.runs if run.is_over)}


def _show_failure(run: Run) -> None:
    """Print the traceback of a failed run, or the end of its output if there is none."""
    error, status_of_run = run.record.error, run.record.status
    if status_of_run == "ok" or not error.type:
        return
    name = Path(run.directory).name
    if error.traceback and status_of_run != "preempted":  # the traceback of a signal is ptdbench's
        echo(f"\n{name}, rank {error.rank}:\n{error.traceback.rstrip()}", sys.stderr)
    elif run.job and (tail := status.log_tail(run.job)):
        echo(f"\n{name}, the end of its output:\n{tail}", sys.stderr)


def _print_changes(runs: Sequence[Run], states: dict[str, str]) -> None:
    """Print the state of each run that is not the one in ``states``, which is updated."""
    for run in runs:
        if states.get(run.directory) != (state := state_text(run)):
            states[run.directory] = state
            job = f"job {run.job.id} " if run.job else ""
            echo(f"{job}{Path(run.directory).name}: {state}", sys.stderr)
