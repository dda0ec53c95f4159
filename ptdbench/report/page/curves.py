"""Curves of a report: steps and loss, and throughput by number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct

from ptdbench.grouping import grouped
from ptdbench.profiling import perfetto, schedule
from ptdbench.records.effects import affects
from ptdbench.records.load import Run
from ptdbench.records.run_record import RunRecord
from ptdbench.records.store import Damaged
from ptdbench.report import columns

#: Maximum number of rows with curves: more could not be told apart.
_ROWS = 40

#: Maximum number of rows with schedules: reading a trace may take seconds.
_PIPELINES = 8

#: Maximum number of points of a curve.
_POINTS = 400


def of_steps(rows: Mapping[int, columns.Row]) -> dict[str, object]:
    """Return the curves of the first measured rows; ``rows`` are keyed by number.

    Returns:
        ``steps``: for each of the first rows with any steps, ``number``, ``step`` (points of the curves, counted from
        1), ``seconds`` of the slowest rank and ``loss``; null: unknown. ``drawn``: the maximum number of rows with
        curves.
    """
    rows = {number: row for number, row in rows.items() if not row.run.kind}  # others have no times or losses
    drawn = [curve for number in list(rows)[:_ROWS] if (curve := _curve(number, rows[number].run))]
    return {"steps": drawn, "drawn": _ROWS}


def _curve(number: int, run: RunRecord) -> dict[str, object] | None:
    """Return the curve of a run; ``None`` if it has done no step, or its series is gone."""
    losses = _series(run, "losses")
    if not len(losses):
        return None
    seconds = _series(run, "slowest_seconds")
    kept = _thinned(seconds, losses)
    return {"number": number, "step": (kept + 1).tolist(), "seconds": _json(seconds[kept]), "loss": _json(losses[kept])}


def _series(run: RunRecord, name: str) -> np.ndarray:
    """Return a series of a run; empty if its file is missing or damaged."""
    try:
        return Run(run, Path(run.directory)).series(name)
    except (FileNotFoundError, Damaged):
        return np.empty(0)


def _thinned(*curves: np.ndarray) -> np.ndarray:
    """Return the steps to draw, ``[points]``: all, or from equal parts of the run the extremes and the last step."""
    count = len(curves[0])
    if count <= _POINTS:
        return np.arange(count)
    parts = np.array_split(np.arange(count), _POINTS // (2 * len(curves) + 1))
    kept = [0, *(part[-1] for part in parts)]
    for values in curves:
        finite = values[np.isfinite(values)]
        filled = np.where(np.isfinite(values), values, np.median(finite) if len(finite) else 0.0)  # no extremes
        kept += [part[extreme] for part in parts for extreme in (filled[part].argmin(), filled[part].argmax())]
    return np.unique(kept)


def _json(values: np.ndarray) -> list[float | None]:
    """Round to seven significant digits, the precision of fp32; ``None`` if not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def schedules(rows: Mapping[int, columns.Row]) -> list[dict[str, object]]:
    """Return the schedules of the first pipelines that have a trace: ``number``, ``passes``, and ``lines`` of text."""
    pipelines = {number: row.run for number, row in rows.items() if (row.run.layout.pipeline or 1) > 1}
    paths = [(number, Path(run.directory) / perfetto.NAME) for number, run in pipelines.items() if not run.kind]
    traced = [(number, path) for number, path in paths if path.exists()][:_PIPELINES]
    drawn: list[dict[str, object]] = []
    for number, path in traced:
        if passes := schedule.read(path):
            lines = [f"{rows[number].name}, {line}" for line in schedule.lines(passes)]
            drawn.append({"number": number, "passes": passes, "lines": lines})
    return drawn


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


def points(rows: Mapping[int, columns.Row]) -> list[Point]:
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
    """Return the fastest point of each number of ranks, from the fewest ranks to the most."""
    fastest = {point.ranks: point for point in sorted(points, key=attrgetter("rate"))}
    return [fastest[ranks] for ranks in sorted(fastest)]
