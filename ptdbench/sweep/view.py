"""The table of a sweep that may still be going on: queue, step, throughput and how each run ended."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ptdbench.sweep.status import Run, Sweep

#: What a run's own share of its start was spent on, as in ``metrics.startup_seconds``.
STARTUP = ("import", "config", "rendezvous", "build", "first_step")

HEADINGS = ("#", "job", "run", "shape", "state", "step", "tokens/s", "startup s")


def rows(sweep: Sweep) -> Iterator[tuple[str, ...]]:
    """A row of cells for each run, under :data:`HEADINGS`."""
    for number, run in enumerate(sweep.runs):
        job = run.job
        yield (
            str(job.number if job else number),
            (job.id or "?") if job else "-",
            _label(run.record),
            job.shape if job else _shape(run.record),
            state(run),
            _step(run),
            _rate(run),
            _startup(run.record),
        )


def table(sweep: Sweep, limit: int | None = None) -> Table:
    """The rows as a table for a terminal, at most ``limit`` of them."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        drawn.add_column(heading, justify="right" if heading in ("#", "step", "tokens/s", "startup s") else "left")
    for row in list(rows(sweep))[:limit]:
        drawn.add_row(*row)
    return drawn


def text(sweep: Sweep) -> str:
    """The rows as plain text, quickly also for thousands of them, and the reasons below."""
    cells = [HEADINGS, *rows(sweep)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([*lines, *reasons(sweep)])


def reasons(sweep: Sweep) -> Iterator[str]:
    """Why runs failed, and why the queue is not shown."""
    for run in sweep.runs:
        error = run.record.get("error") or {}
        if run.is_over and error:
            where = f" on rank {error['rank']}" if error["rank"] >= 0 else ""
            message = textwrap.shorten(f"{error['type']}: {error['message']}", 300)
            yield f"{Path(run.directory).name}: {run.record['status']}{where}: {message}"
    if sweep.silence:
        yield f"SLURM does not answer: {sweep.silence}"


def state(run: Run) -> str:
    """Where a run stands, in a few words: the queue's while it is there, then the record's."""
    if run.is_over:
        error = run.record.get("error") or {}
        told = error.get("type", "")
        return f"{run.record['status']} ({told})" if told.isupper() else run.record["status"]
    if run.queue is None:
        return "not submitted" if run.job and not run.job.id else "unfinished"
    if run.queue.state in ("PENDING", "SUSPENDED"):
        reason = run.queue.reason
        return f"{run.queue.state} ({reason})" if reason not in ("", "None") else run.queue.state
    return f"{run.queue.state} {run.queue.nodes}".rstrip()


def _label(record: Mapping[str, Any]) -> str:
    return " ".join(str(record[name]) for name in ("model", "parallel") if record.get(name)) or record["workload"]


def _shape(record: Mapping[str, Any]) -> str:
    nodes, size = len(record.get("nodes") or []), record.get("world_size")
    return f"{nodes} node{'s' * (nodes != 1)}, {size} ranks" if nodes and size else "-"


def _step(run: Run) -> str:
    if run.is_over:
        return str(len(run.record.get("losses") or [])) if run.record.get("losses") else "-"
    return f"{run.progress['step']}/{run.progress['steps']}" if run.progress else "-"


def _rate(run: Run) -> str:
    metrics = run.record.get("metrics") or {}
    if run.is_over:
        tokens, samples = metrics.get("tokens_per_second"), metrics.get("samples_per_second")
        return f"{tokens:,.0f}" if tokens else f"{samples:,.1f} samples" if samples else "-"
    if not run.progress or not run.progress["per_second"]:
        return "-"
    return f"{run.progress['per_second']:,.0f}" + (" samples" if run.progress["unit"] == "samples" else "")


def _startup(record: Mapping[str, Any]) -> str:
    """``9.1 = 4.2 + 0.3 + 0.1 + 0.5 + 4.0``: the parts in the order of :data:`STARTUP`."""
    spent = (record.get("metrics") or {}).get("startup_seconds")
    if not spent:
        return "-"
    return f"{sum(spent.values()):.1f} = " + " + ".join(f"{spent.get(name, 0):.1f}" for name in STARTUP)
