"""A report as one HTML file that needs no network, with all its data as JSON."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import count
from string import Template
from typing import Any

from ptdbench.comparison import predictions
from ptdbench.comparison.alternatives import of_sweeps, sweep_of
from ptdbench.files import strict
from ptdbench.grouping import grouped
from ptdbench.profiling.phases import KINDS, PHASES
from ptdbench.profiling.schedule import PASSES
from ptdbench.records.effects import options_affecting
from ptdbench.records.run_record import RunRecord
from ptdbench.report import columns, table, virtual
from ptdbench.report.columns import Row, Section
from ptdbench.report.explanation import memory_of_largest_rank
from ptdbench.report.labels import Environments, by_option, short_paths, titles, varying
from ptdbench.report.page import curves
from ptdbench.report.remarks import reason
from ptdbench.report.steps import recorded_step, why_no_phases
from ptdbench.report.text import MISSING
from ptdbench.terminal import ESCAPED, plain

#: Width in columns of the output of other workloads.
_WIDTH = 120

#: The columns next to the name of a row; a phone shows no others without scrolling.
_FIRST = (
    "rank",
    "configuration",
    "throughput",
    "ratio",
    "predicted_ms",
    "bound_by",
    "plan_fits",
    "plan_max_mb",
    "plan_left_mib",
)


def page(title: str, subtitle: str, runs: Sequence[RunRecord]) -> str:
    """Return the report of runs whose ``directory`` fields give their current location."""
    return document(title, subtitle, content(runs))


def content(runs: Sequence[RunRecord]) -> dict[str, object]:
    """Return the data of a report.

    Returns:
        ``models``: id, title, ``rows``, remarks and curves of each section; ``columns`` of rows; ``options``: varying
        ones by name, with a value for each row, as typed; ``told``: options that columns show; ``common``: options
        that all rows share; ``sweeps``: short names of paths; ``others``: results of other workloads; ``environments``:
        fields by title. Rates are in tokens or samples per second, times in seconds, sizes in bytes.
    """
    sections = columns.sections(of_sweeps(run for run in runs if run.model))
    values = by_option([row.run for section in sections for row in section.rows])
    differing = varying(values)
    environments = Environments(runs)
    numbers = count()
    numbered = [(section, {next(numbers): row for row in section.rows}) for section in sections]
    # Curves of weak scaling go on in sections of other batches, and are in that in which they begin.
    by_model = grouped((section.model, point) for section, rows in numbered for point in curves.points(rows))
    scaling = [curve for points in by_model.values() for curve in curves.scaling_curves(points, differing)]
    others = [run for run in runs if not run.model]
    return {
        "models": [_model(section, rows, scaling, environments) for section, rows in numbered],
        "columns": [column.on_page() for name in _FIRST for column in columns.COLUMNS if column.name == name]
        + [column.on_page() for column in columns.COLUMNS if column.name not in _FIRST],
        "sweeps": {str(path): name for path, name in short_paths(map(sweep_of, runs)).items()},
        "options": differing,
        "told": options_affecting("told"),
        "common": {name: texts[0] for name, texts in values.items() if len(set(texts)) == 1},
        "phases": PHASES,
        "kinds": KINDS,
        "passes": PASSES,
        "others": [_other(run, title, environments) for run, title in zip(others, titles(others), strict=True)],
        "environments": environments.described(),
    }


def _model(
    section: Section, rows: Mapping[int, Row], scaling: Sequence[curves.Curve], environments: Environments
) -> dict[str, object]:
    ranks = [row.place.rank for row in rows.values() if row.place.rank]
    return {
        "id": re.sub(r"\W+", "-", f"table-{section.name}"),
        "name": section.name,
        "title": section.title(),
        "answer": section.answer,
        "unit": section.unit,
        "device": section.device,
        "usual": [column.name for column in section.columns("page")],
        "rows": [
            {
                "number": number,
                # No other row is known to be faster, and at least one is known to be slower.
                "best": row.place.rank is not None and row.place.rank[0] == 1 and row.place.rank[1] < len(ranks),
                **_row(row, environments),
            }
            for number, row in rows.items()
        ],
        "remarks": section.remarks,
        "why": section.why,
        "model": section.model,
        "schedules": curves.schedules(rows),
        **curves.of_steps(rows),
        "scaling": [curve for curve in scaling if curve.rows[0] in rows],
    }


def _row(row: Row, environments: Environments) -> dict[str, object]:
    """Return the figures of all columns and plots, in the units of records."""
    place, record = row.place, row.run
    against, rate, margin = place.against_best, place.rate, place.margin
    has_phases = not record.kind and not why_no_phases(record)
    return {
        **{column.field or column.name: column.value(row) for column in columns.COLUMNS},
        "texts": {column.name: text for column in columns.COLUMNS if (text := column.cell(row)) != MISSING},
        "parallel": record.parallel,
        "predicted_rate": predictions.rate_of(record) or None,
        "low": None if rate is None or margin is None else rate / (1 + margin),
        "high": None if rate is None or margin is None else rate * (1 + margin),
        "ratio_low": against and against.low,
        "ratio_high": against and against.high,
        "step_p5": record.step_seconds.p5,
        "step_p95": record.step_seconds.p95,
        "phases": [*recorded_step(record).phases.values()] if has_phases else None,
        "kinds": (kinds := memory_of_largest_rank(record)) and list(kinds.values()),
        "command": record.rerun_command(),
        "runs": [_run(run, environments) for run in row.runs],
    }


def _run(run: RunRecord, environments: Environments) -> dict[str, object]:
    return {
        "directory": run.directory,
        "status": run.status,
        "started": run.started,
        "block": run.option("repeat.block", int),
        "rate": run.throughput,
        "reason": None if run.status == "ok" else reason(run),
        "failed": run.status != "ok" and not virtual.does_not_fit(run),
        "environment": environments.number(run),
    }


def _other(run: RunRecord, title: str, environments: Environments) -> dict[str, object]:
    """Return a run that does not train, as rendered by its workload."""
    return {
        "title": title,
        "text": table.of_workload(run, _WIDTH),
        "command": run.rerun_command(),
        "runs": [_run(run, environments)],
    }


#: The scripts of the page, in this order.
_SCRIPTS = ("words.js", "tables.js", "drawings.js", "figures.js", "main.js")


def document(title: str, subtitle: str, content: Mapping[str, Any]) -> str:
    """Return the page for the data from :func:`content`, whose answers are on top, with links to their tables."""
    from plotly.offline import get_plotlyjs

    answers = []
    for model in (models := content.get("models", [])):
        name, answer = (html.escape(plain(model[field])) for field in ("name", "answer"))
        answers.append(f'<a href="#{html.escape(model["id"])}">{name}</a>: {answer}' if len(models) > 1 else answer)
    data = json.dumps(strict(content), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    data = data.translate({code: f"\\{text}" for code, text in ESCAPED.items()})  # as JSON, which has its own escapes
    return Template(_part("page.html")).substitute(
        style=_part("page.css"),
        script="\n".join(map(_part, _SCRIPTS)),
        title=html.escape(plain(title)),
        answers="\n".join(f'  <p class="answer">{line}</p>' for line in answers),
        subtitle=html.escape(plain(subtitle)),
        plotly=get_plotlyjs(),
        data=data.replace("<", "\\u003c"),  # so that no text in a record can close the element
    )


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
