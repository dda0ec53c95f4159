"""Final tables: the ranking of the runs that trained, and the results of other workloads."""

from __future__ import annotations

import json
import os
import pkgutil
import shlex
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from ptdbench.comparison import alternatives
from ptdbench.profiling import perfetto
from ptdbench.records.record import option
from ptdbench.records.schema import Written
from ptdbench.records.store import RECORD, RESULTS
from ptdbench.report import columns, recorded_phases, virtual
from ptdbench.report.columns import Block
from ptdbench.report.remarks import reason
from ptdbench.report.text import fitted, lines, longest_word, wrap
from ptdbench.terminal import command
from ptdbench.units import size_text

#: Lines of a stranger's results that are shown, and characters of each.
_MOST_LINES, _LONGEST = 60, 200


def render(records: Sequence[Written], width: int = 100, typed: Collection[str] = ()) -> str:
    """The runs of each model, fastest first and those that did not finish last, as plain text.

    Columns without a figure are left out. Where there is no room for the others in ``width`` columns, the
    number of ranks and the batch stand in the title if all runs have the same, what matters least is left out and named
    below, and words fold; a figure is never cut. ``typed`` is as for :func:`of_workload`.
    """
    found = alternatives.group(record for record in records if record.get("model"))
    shown = [_of_model(one, width) for one in columns.blocks(found)]
    shown += [of_workload(record, width, typed) for record in records if not record.get("model")]
    return "\n\n".join(shown)


#: Where Hydra's Optuna writes what it found.
SEARCHED = "optimization_results.yaml"


def closing_lines(directory: Path, records: Iterable[Written] = ()) -> str:
    """Return where the records of a run or a sweep are, and how to look at phases and curves and to send them."""
    shown = shlex.quote(os.path.relpath(directory))
    is_sweep = (directory / RESULTS).exists()
    lines = [f"records      {shown}/{RESULTS if is_sweep else RECORD}"]
    records = list(records)
    if any(recorded_phases.missing(record) is None for record in records):
        lines.append(f"phases       {command('explain')} {shown}")
    elif any(map(virtual.has_figures, records)):
        lines.append(f"memory       {command('explain')} {shown}")
    if is_sweep:
        lines.append(f"report       {command('report')} {shown}")
    for name in (perfetto.NAME, perfetto.MEMORY):
        if traces := [path for where in (name, f"*/{name}") for path in directory.glob(where)]:
            folder = f"{shown}/*" if is_sweep else shown
            size = size_text(sum(path.stat().st_size for path in traces))
            title = "trace" if name == perfetto.NAME else "memory"
            lines.append(f"{title:12} {folder}/{name} ({size}), for https://ui.perfetto.dev")
    if any(directory.glob("events.*")) or any(directory.glob("*/events.*")):
        lines.append(f"TensorBoard  tensorboard --logdir {shown}")
        if is_sweep:
            lines.append("             (its HPARAMS tab ranks the runs)")
    if (directory / SEARCHED).exists():
        lines.append(f"search       {shown}/{SEARCHED}")
    return "\n".join(lines)


def of_workload(record: Written, width: int, typed: Collection[str] = ()) -> str:
    """Render the result of a workload that does not train, even if that is no success, or why there is none.

    A record is data, perhaps somebody else's: the workloads of ptdbench show their results themselves, and a stranger's
    are shown as they are on record, without the code that it names; but for those ``typed``, which the person who looks
    has just let run.
    """
    workload = str(record.get("workload"))
    lines = []
    try:
        if found := record.get(workload):
            target = option(record, "workload._target_", str) or ""
            shows = get_object(target) if target in typed else _own_workload(target)
            lines.append(shows.show(found, width) if shows else _as_it_is(found))
    except Exception as error:  # its types are not in the schema
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        lines = [f"{workload}: the results in {record['directory']} cannot be shown: {cause}"]
    if record["status"] != "ok" or not lines:
        lines.append(wrap(f"{workload}: {reason(record)}", width))
    return "\n".join(lines)


def _own_workload(target: str) -> Any:
    """The workload of ptdbench of this name; nothing is imported to see that there is none."""
    package = import_module("ptdbench.workloads")
    module, _, name = target.rpartition(".")
    if module not in {f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)}:
        return None
    found = vars(import_module(module)).get(name)
    return found if getattr(found, "__module__", None) == module else None


def _as_it_is(found: object) -> str:
    lines = json.dumps(found, indent=1).splitlines()
    shown = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…" for line in lines[:_MOST_LINES]]
    left_out = len(lines) - len(shown)
    return "\n".join([*shown, *([f"… and {left_out:,} lines more in {RECORD}"] if left_out else [])])


def _of_model(found: Block, width: int) -> str:
    """Title, table and remarks for the runs of one model."""
    columns, repeats = found.columns(), any(len(place.alternative.runs) > 1 for place in found.ranking.places)
    rows = [[row[name] for name in columns] for row in found.rows]
    alike = [name for name, one in columns.items() if one.moved and len({row[name] for row in found.rows}) == 1]
    order = {name: place for name, one in columns.items() if (place := one.spared[repeats]) is not None}
    spared = [*alike, *sorted(order, key=lambda name: order[name])]
    headings = list(columns)
    widths = fitted(headings, rows, width, {"parallel": longest_word(headings, rows, "parallel")}, spared)
    text = "\n".join(lines(headings, rows, widths, {name for name, one in columns.items() if one.words}))
    gone = [name for name in spared if name not in widths]
    moved = [columns[name].moved.format(found.rows[0][name]) for name in gone if name in alike]
    left_out = [name for name in gone if name not in alike]
    remarks = [*([f"left out in {width} columns: {', '.join(left_out)}"] if left_out else []), *found.remarks]
    return "\n".join([found.title(moved), text, *(wrap(line, width) for line in [*remarks, *found.why])])
