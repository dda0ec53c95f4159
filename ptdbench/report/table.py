"""Final tables: the ranking of training runs, the results of other workloads, and plans."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from msgspec import ValidationError, convert

from ptdbench import terminal
from ptdbench.comparison import alternatives, ranking
from ptdbench.grouping import grouped
from ptdbench.measure.results import Findings
from ptdbench.profiling import perfetto
from ptdbench.records.run_record import RunRecord
from ptdbench.records.store import RECORD, RESULTS, is_sweep, read_record, read_results, write_results
from ptdbench.report import columns, text, virtual
from ptdbench.report.columns import Row, Section
from ptdbench.report.labels import names
from ptdbench.report.remarks import reason
from ptdbench.report.steps import why_no_phases
from ptdbench.report.text import MISSING, Column, wrap
from ptdbench.report.workload_tables import TABLES
from ptdbench.terminal import command, echo
from ptdbench.units import size_text, three_digits

#: Maximum lines of third-party results to show, and characters of each.
_MOST_LINES, _LONGEST = 60, 200


def show_results(directory: Path) -> list[RunRecord]:
    """Print the final table of a run or a sweep, and where to read on; return its records.

    Those of a sweep are also written into one file. Nothing is printed if a signal arrived before the first run began.
    """
    if is_sweep(directory):
        records = read_results(directory, lambda damage: echo(damage, sys.stderr))
        if records:
            with suppress(OSError):  # a sweep of someone else
                write_results(directory, records)
    else:
        records = [read_record(directory)] if (directory / RECORD).exists() else []
    if records:
        width = terminal.width()
        plans = all(record.kind == "planned" for record in records)
        echo(of_plans(records, width) if plans else render(records, width))
        echo(closing_lines(directory, records))
    return records


def render(records: Sequence[RunRecord], width: int = 100) -> str:
    """Return the runs of each model as plain text, fastest first and unfinished ones last.

    Columns without a figure are omitted. If the others do not fit in ``width`` characters, the number of ranks and the
    batch move to the title if all runs have the same, the least important columns are omitted and named below, and
    words wrap; a figure is never truncated.
    """
    trained = alternatives.group(record for record in records if record.model)
    shown = [_of_model(section, width) for section in columns.sections(trained)]
    shown += [of_workload(record, width) for record in records if not record.model]
    return "\n\n".join(shown)


#: The file in which Hydra's Optuna sweeper writes its results.
SEARCHED = "optimization_results.yaml"


def closing_lines(directory: Path, records: Sequence[RunRecord] = ()) -> str:
    """Return where the records of a run or a sweep are, and the commands for phases, curves and a report."""
    shown = shlex.quote(os.path.relpath(directory))
    of_sweep = (directory / RESULTS).exists()
    lines = [f"records      {shown}/{RESULTS if of_sweep else RECORD}"]
    if any(why_no_phases(record) is None for record in records):
        lines.append(f"phases       {command('explain')} {shown}")
    elif any(map(virtual.has_figures, records)):
        lines.append(f"memory       {command('explain')} {shown}")
    if of_sweep:
        lines.append(f"report       {command('report')} {shown}")
    if traces := [*directory.rglob(perfetto.NAME)]:
        folder = "/".join([shown, *("*" for _ in traces[0].relative_to(directory).parts[1:])])
        size = size_text(sum(path.stat().st_size for path in traces))
        lines.append(f"trace        {folder}/{perfetto.NAME} ({size})\n{'':12} (open it at https://ui.perfetto.dev)")
    if any(directory.rglob("events.*")):
        lines.append(f"TensorBoard  tensorboard --logdir {shown}")
        if of_sweep:
            lines.append("             (HPARAMS tab: sort by summary/throughput)")
    if (directory / SEARCHED).exists():
        lines.append(f"search       {shown}/{SEARCHED}")
    return "\n".join(lines)


def of_workload(record: RunRecord, width: int) -> str:
    """Render the result of a workload that does not train, even if it failed, or why there is none.

    Results of a workload from outside ptdbench are shown as recorded: the code that a record names is not run.
    """
    if record.workload == "program":
        return virtual.of_program(record, width)
    lines = [_results(results, record.workload, width)] if (results := record.written.get(record.workload)) else []
    if record.status == "ok" and not lines:
        without = f"ok, without a result to show: its outcome has no field {record.workload}"
        lines.append(wrap(f"{record.workload}: {without}", width))
    elif record.status != "ok":
        lines.append(wrap(f"{record.workload}: {reason(record)}", width))
    return "\n".join(lines)


def _results(results: object, workload: str, width: int) -> str:
    if workload in TABLES:
        with suppress(ValidationError):  # of another workload with this name
            return TABLES[workload](getattr(convert({workload: results}, Findings), workload), width)
    return _as_recorded(results)


def _as_recorded(results: object) -> str:
    lines = json.dumps(results, indent=1).splitlines()
    shown = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…" for line in lines[:_MOST_LINES]]
    left_out = len(lines) - len(shown)
    return "\n".join([*shown, *([f"… and {left_out:,} lines more in {RECORD}"] if left_out else [])])


def _of_model(section: Section, width: int) -> str:
    """Return title, table and remarks for the runs of column model; columns equal in all rows are omitted first."""
    rows, possible = section.rows, section.columns()
    repeats = any(len(row.runs) > 1 for row in rows)
    alike = {
        column.heading: column.in_title(column.cell(rows[0]))
        for column in possible
        if column.in_title and len({*map(column.cell, rows)}) == 1
    }
    shown = [column.in_table(repeats, column.heading in alike) for column in possible]
    lines, gone = text.table(shown, rows, width)
    by_place = sorted(shown, key=lambda column: column.drop_order or 0)
    spared = [column.heading for column in by_place if column.heading in gone and (column.drop_order or 0) >= 0]
    title = section.title(alike[heading] for heading in gone if heading in alike)
    below = [*text.left_out(spared, width), *(wrap(line, width) for line in (*section.remarks, *section.why))]
    return "\n".join([title, *lines, *below])


def of_plans(records: Sequence[RunRecord], width: int) -> str:
    """Return a table of the neediest rank of each plan, in GiB, with its predicted step, and with remarks below.

    Those with a predicted time come first, the fastest of them at the top.
    """
    named = dict(zip(map(id, records), names(records), strict=True))
    rows = [Row(place, named[id(place.alternative.runs[0])]) for place in ranking.rank_predicted(records)]
    is_timed = any(row.place.rate for row in rows)
    of_memory = [columns.planned(heading, lambda size: three_digits(size / 2**30)) for heading in virtual.PLANNED]
    if is_timed:
        beside = virtual.BESIDE_TIMES
        of_memory = [replace(column, drop_order=beside.get(column.heading, column.drop_order)) for column in of_memory]
    possible: list[Column[Row]] = [
        Column("layout", attrgetter("name"), is_text=True),
        Column("ranks", lambda row: str(row.run.world_size or MISSING), drop_order=5 if is_timed else None),
        *columns.PREDICTED,
        *of_memory,
    ]
    shown = [column for column in possible if any(column.cell(row) != MISSING for row in rows)]
    lines, gone = text.table(shown, rows, width)
    models = ", ".join(dict.fromkeys(str(record.model) for record in records))
    lacking = grouped((lack, row.name) for row in rows if (lack := _lack(row.run)))
    remarks = [*(f"{', '.join(whose)}: {lack}" for lack, whose in lacking.items()), *virtual.of_plans(records)]
    timed = " · times predicted, not measured" if is_timed else ""
    lines = [f"{models} · planned, GiB on the most heavily loaded rank{timed}", *lines, *text.left_out(gone, width)]
    return "\n".join([*lines, *(wrap(line, width) for line in dict.fromkeys(remarks))])


def _lack(plan: RunRecord) -> str | None:
    """Return why a plan does not fit, is of the training state alone, or has no time; ``None`` if it is whole."""
    if plan.status != "ok":
        return reason(plan)
    if plan.plan.reason:
        return f"only the training state is known: {plan.plan.reason}"
    return f"no predicted time: {plan.predicted.reason}" if plan.predicted.reason else None
