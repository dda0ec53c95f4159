"""The table of a sweep that may still be going on: queue, step, throughput and how each run ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ptdbench.records.record import option
from ptdbench.records.schema import Metrics, Record, part
from ptdbench.report import text as table
from ptdbench.report.labels import name
from ptdbench.report.reason import reason, wrap
from ptdbench.sweep.status import Run, Sweep
from ptdbench.terminal import plain, plural

#: What a run's own share of its start was spent on, as in ``metrics.startup_seconds``.
STARTUP = ("import", "config", "rendezvous", "build", "first_step")

HEADINGS = ("#", "job", "run", "shape", "state", "step", "tokens/s", "startup s")

#: Columns of words; the others have figures.
_WORDS = ("job", "run", "shape", "state")

#: Columns that are left out where there is no room for all, the first one first.
_SPARED = ("startup s", "shape", "tokens/s", "job", "step")

#: Columns that are cut before another is left out, and to how much.
_LEAST = {"run": 12, "state": 12}


def rows(sweep: Sweep) -> Iterator[tuple[str, ...]]:
    """A row of cells for each run, under :data:`HEADINGS`; each in one line."""
    for number, run in enumerate(sweep.runs):
        job = run.job
        cells = (
            str(job.number if job else number),
            (job.id or "?") if job else "-",
            _label(run),
            job.shape if job else _shape(run.typed),
            state(run),
            _step(run),
            _rate(run),
            _startup(run.typed),
        )
        yield tuple(plain(" ".join(cell.split())) for cell in cells)


def as_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep as ``status --json`` prints it; docs/results.md says what each key means."""
    return {
        "is_over": sweep.is_over,
        "runs": [_as_json(run, number) for number, run in enumerate(sweep.runs)],
        "damage": list(sweep.damage),
        "slurm": sweep.silence or None,
    }


def _as_json(run: Run, number: int) -> dict[str, Any]:
    record, job, going_on = run.record, run.job, None if run.is_over else run.progress
    metrics = part(record, Metrics)
    rates = {"samples_per_second": metrics.samples_per_second, "tokens_per_second": metrics.tokens_per_second}
    if going_on:
        rates[f"{going_on.unit}_per_second"] = going_on.per_second
    return {
        "number": job.number if job else number,
        "directory": run.directory,
        "run": _label(run),
        "job": job.id if job else None,
        "queue": run.queue.state if run.queue else None,
        "nodes": record.get("nodes"),
        "world_size": record.get("world_size"),
        "status": record["status"],
        "is_over": run.is_over,
        "step": going_on.step if going_on else record.get("steps"),
        "steps": going_on.steps if going_on else option(record, "train.steps", int),
        **rates,
        "startup_seconds": metrics.startup_seconds,
        "error": record.get("error"),
    }


def lines(sweep: Sweep, width: int | None = None) -> list[str]:
    """Headings, a rule and the rows, quickly also for thousands of them.

    Args:
        sweep: What to show.
        width: Columns that no line exceeds: what matters least is left out, and the rest cut; ``None``: all of it.
    """
    cells = list(rows(sweep))
    widths = table.fitted(HEADINGS, cells, width, _LEAST, _SPARED)
    drawn = table.lines(HEADINGS, cells, widths, _WORDS, folds=False)
    return [table.cropped(line, width) for line in drawn]


def text(sweep: Sweep, width: int | None = None) -> str:
    """The rows as plain text, and below what there was no room for, and the reasons; see :func:`lines`."""
    drawn = lines(sweep, width)
    left_out = [heading for heading in HEADINGS if heading not in drawn[0]]
    below = [f"left out in {width} columns: {', '.join(left_out)}"] if left_out else []
    return "\n".join([*drawn, *(wrap(line, width) for line in (*below, *reasons(sweep)))])


def reasons(sweep: Sweep) -> Iterator[str]:
    """Why runs failed, which results are damaged, and why the queue is not shown."""
    for run in sweep.runs:
        if run.is_over and run.typed.error:
            yield f"{run.directory}: {reason(run.record)}"
    yield from sweep.damage
    if sweep.silence:
        yield f"SLURM does not answer: {sweep.silence}"


def state(run: Run) -> str:
    """Where a run stands, in a few words: the queue's while it is there, then the record's."""
    if run.is_over:
        kind = run.typed.error.type if run.typed.error else ""
        return f"{run.typed.status} ({kind})" if kind.isupper() else run.typed.status
    if run.queue is None:
        return "not submitted" if run.job and not run.job.id else "unfinished"
    if run.queue.state in ("PENDING", "SUSPENDED"):
        why = run.queue.reason
        return f"{run.queue.state} ({why})" if why not in ("", "None") else run.queue.state
    if run.job and run.job.step is not None and run.job.step > 0 and not run.typed.owner:
        return "waits in its job"
    return f"{run.queue.state} {run.queue.nodes}".rstrip()


def _label(run: Run) -> str:
    (*sweep, _), named = Path(run.directory).parts, name(run.record)
    of_block = option(run.record, "repeat.series", str)
    return f"{named} [{'/'.join(sweep)}]" if of_block and sweep else named


def _shape(record: Record) -> str:
    return (
        f"{plural(len(record.nodes), 'node')}, {record.world_size} ranks" if record.nodes and record.world_size else "-"
    )


def _step(run: Run) -> str:
    if run.is_over:
        return str(run.typed.steps or "-")
    return f"{run.progress.step}/{run.progress.steps}" if run.progress else "-"


def _rate(run: Run) -> str:
    if run.is_over:
        metrics = run.typed.metrics or Metrics()
        tokens, samples = metrics.tokens_per_second, metrics.samples_per_second
        return f"{tokens:,.0f}" if tokens else f"{samples:,.1f} samples" if samples else "-"
    if not run.progress or not run.progress.per_second:
        return "-"
    return f"{run.progress.per_second:,.0f}" + (" samples" if run.progress.unit == "samples" else "")


def _startup(record: Record) -> str:
    """``9.1 = 4.2 + 0.3 + 0.1 + 0.5 + 4.0``: the parts in the order of :data:`STARTUP`."""
    spent = record.metrics and record.metrics.startup_seconds
    if not spent:
        return "-"
    return f"{sum(spent.values()):.1f} = " + " + ".join(f"{spent.get(name, 0):.1f}" for name in STARTUP)
