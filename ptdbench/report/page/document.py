"""The report as one HTML file that needs no network: figures of records as JSON, and the scripts that draw them.

Python computes and JavaScript displays: the scripts in this folder filter, sort, and draw with plotly.
"""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import count
from operator import attrgetter
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from ptdbench.comparison.ranking import of_sweeps, sweep_of
from ptdbench.files import strict
from ptdbench.grouping import grouped
from ptdbench.profiling import perfetto
from ptdbench.profiling.perfetto import PASSES
from ptdbench.profiling.phases import KINDS, PHASES
from ptdbench.records.effects import affects, options_affecting
from ptdbench.records.load import Run
from ptdbench.records.run_record import RunRecord
from ptdbench.records.store import Damaged
from ptdbench.report import columns, table, virtual
from ptdbench.report.columns import Row, Section
from ptdbench.report.explanation import memory_of_largest_rank
from ptdbench.report.labels import Environments, by_option, short_paths, titles, varying
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


class Point(NamedTuple):
    """A row of a table as a point of a scaling curve."""

    number: int  #: The number of the row.
    rate: float  #: Its throughput.
    ranks: int  #: Its number of ranks.
    batch: int  #: Its global batch.
    parallel: str | None  #: Its choice of ``parallel``.


class Curve(Struct):
    """A curve of scaling."""

    kind: Literal["strong", "weak"]  #: Whether the global batch is constant, or that per rank.
    name: str  #: Its name.
    rows: list[int]  #: Its rows by their numbers, from the fewest ranks to the most.
    efficiency: list[float]  #: The throughput per rank of each row relative to the first row.


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
    by_model = grouped((section.model, point) for section, rows in numbered for point in scaling_points(rows))
    scaling = [curve for points in by_model.values() for curve in scaling_curves(points, differing)]
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
    section: Section, rows: Mapping[int, Row], scaling: Sequence[Curve], environments: Environments
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
        "schedules": _schedules(rows),
        **step_curves(rows),
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
        "predicted_rate": record.predicted.rate or None,
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


#: Maximum number of rows with curves: more could not be told apart.
_MOST_CURVES = 40

#: Maximum number of points of a curve.
_MOST_POINTS = 400


def step_curves(rows: Mapping[int, Row]) -> dict[str, object]:
    """Return the curves of the first measured rows, by their numbers, and the maximum number of rows with curves.

    ``step`` has the points of a curve, counted from 1; null in ``seconds`` of the slowest rank or ``loss``: unknown.
    """
    rows = {number: row for number, row in rows.items() if not row.run.kind}  # others have no times or losses
    drawn = [curve for number in list(rows)[:_MOST_CURVES] if (curve := _step_curve(number, rows[number].run))]
    return {"steps": drawn, "drawn": _MOST_CURVES}


def _step_curve(number: int, run: RunRecord) -> dict[str, object] | None:
    """Return the curve of a run; ``None`` if it has done no step, or its series is gone."""
    losses = _series(run, "losses")
    if not len(losses):
        return None
    seconds = _series(run, "slowest_seconds")
    kept = _thinned(seconds, losses)
    return {
        "number": number,
        "step": (kept + 1).tolist(),
        "seconds": _rounded(seconds[kept]),
        "loss": _rounded(losses[kept]),
    }


def _series(run: RunRecord, name: str) -> np.ndarray:
    """Return a series of a run; empty if its file is missing or damaged."""
    try:
        return Run(run, Path(run.directory)).series(name)
    except (FileNotFoundError, Damaged):
        return np.empty(0)


def _thinned(*curves: np.ndarray) -> np.ndarray:
    """Return the steps to draw, ``[points]``: all, or from equal parts of the run the extremes and the last step."""
    count = len(curves[0])
    if count <= _MOST_POINTS:
        return np.arange(count)
    parts = np.array_split(np.arange(count), _MOST_POINTS // (2 * len(curves) + 1))
    kept = [0, *(part[-1] for part in parts)]
    for values in curves:
        finite = values[np.isfinite(values)]
        filled = np.where(np.isfinite(values), values, np.median(finite) if len(finite) else 0.0)  # no extremes
        kept += [part[extreme] for part in parts for extreme in (filled[part].argmin(), filled[part].argmax())]
    return np.unique(kept)


def _rounded(values: np.ndarray) -> list[float | None]:
    """Round to seven significant digits, the precision of fp32; ``None`` if not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def scaling_points(rows: Mapping[int, Row]) -> list[Point]:
    """Return the points of rows, by their numbers; rows without throughput have none."""
    return [
        Point(number, row.place.rate, run.world_size, run.global_batch, run.parallel)
        for number, row in rows.items()
        if (run := row.run) and row.place.rate and run.world_size and run.global_batch
    ]


def scaling_curves(points: Sequence[Point], options: Mapping[str, Sequence[str | None]]) -> list[Curve]:
    """Return the curves of strong and of weak scaling, of each the one with the highest throughput first.

    The points of a curve have the same choice of ``parallel`` and the same options, except those of degrees, ranks and
    batches. Of several with the same number of ranks the fastest counts.

    Args:
        points: The rows of one model.
        options: The options that vary, with a value for each row.
    """
    options = {  # the others differ between models only
        name: texts for name, texts in options.items() if len({texts[point.number] for point in points}) > 1
    }
    kept = [name for name in options if not affects(name, "degree", "ranks", "batch")]  # not about a size
    kinds: tuple[tuple[Literal["strong", "weak"], Callable[[Point], float], str], ...] = (
        ("strong", lambda point: point.batch, "batch {:g}"),
        ("weak", lambda point: point.batch / point.ranks, "{:g} a rank"),
    )
    drawn = []
    for kind, size, form in kinds:
        alike = grouped(
            ((size(point), point.parallel, *(options[name][point.number] for name in kept)), point) for point in points
        )
        curves = [curve for group in alike.values() if len(curve := _fastest(group)) > 1]
        for curve in sorted(curves, key=lambda curve: -max(point.rate for point in curve)):
            first = curve[0]
            values = {name: options[name][first.number] for name in kept if name != "parallel"}
            words = [f"{name.rpartition('.')[2]}={text}" for name, text in values.items() if text]
            name = ", ".join([" ".join([str(first.parallel), *words]), form.format(size(first))])
            efficiency = [point.rate / point.ranks / (first.rate / first.ranks) for point in curve]
            drawn.append(Curve(kind, name, [point.number for point in curve], efficiency))
    return drawn


def _fastest(points: Sequence[Point]) -> list[Point]:
    fastest = {point.ranks: point for point in sorted(points, key=attrgetter("rate"))}
    return [fastest[ranks] for ranks in sorted(fastest)]


#: Maximum number of rows with schedules: reading a trace may take seconds.
_MOST_SCHEDULES = 8


def _schedules(rows: Mapping[int, Row]) -> list[dict[str, object]]:
    """Return the schedules of the first pipelines that have a trace: ``number``, ``passes``, and ``lines`` of text."""
    pipelines = {number: row.run for number, row in rows.items() if (row.run.layout.pipeline or 1) > 1}
    paths = [(number, Path(run.directory) / perfetto.NAME) for number, run in pipelines.items() if not run.kind]
    traced = [(number, path) for number, path in paths if path.exists()][:_MOST_SCHEDULES]
    drawn: list[dict[str, object]] = []
    for number, path in traced:
        if passes := perfetto.read_passes(path):
            lines = [f"{rows[number].name}, {line}" for line in perfetto.lines_of_ranks(passes)]
            drawn.append({"number": number, "passes": passes, "lines": lines})
    return drawn


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
