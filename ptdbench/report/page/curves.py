"""Curves of a report: steps and loss, results of other workloads, and throughput by number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct, convert

from ptdbench.comparison.alternatives import sweep_of
from ptdbench.grouping import grouped
from ptdbench.measure.results import P2P, Collectives, Matmul
from ptdbench.profiling import perfetto, schedule
from ptdbench.records.effects import affects, options_affecting
from ptdbench.records.load import MOST_LOST, Run
from ptdbench.records.run_record import RunRecord
from ptdbench.records.store import Damaged
from ptdbench.report import columns
from ptdbench.report.remarks import listed, rounding, training
from ptdbench.report.workload_tables import name_of_series
from ptdbench.terminal import plural

#: Maximum number of rows with curves: more could not be told apart.
_ROWS = 40

#: Maximum number of rows with schedules: reading a trace may take seconds.
_PIPELINES = 8

#: Maximum number of points of a curve.
_POINTS = 400


def of_steps(rows: Mapping[int, columns.Row]) -> dict[str, object]:
    """Return the curves of the first measured rows, and remarks on the losses of all; ``rows`` are keyed by number.

    Returns:
        ``steps``: for each of the first rows with any steps, ``number``, ``step`` (points of the curves, counted from
        1), ``seconds`` of the slowest rank and ``loss``; null: unknown. ``losses``: lines on whether losses agree.
        ``drawn``: the maximum number of rows with curves.
    """
    rows = {number: row for number, row in rows.items() if not row.run.kind}  # others have no times or losses
    drawn = [curve for number in list(rows)[:_ROWS] if (curve := _curve(number, rows[number].run))]
    alike = grouped((training(row.run), (row.name, row.run)) for row in rows.values())
    said = [line for group in alike.values() if len(group) > 1 for line in _agreement(dict(group))]
    said += [f"{row.name}: {damage}" for row in rows.values() if (damage := _damage(row.run))]
    return {"steps": drawn, "losses": said, "drawn": _ROWS}


def _curve(number: int, run: RunRecord) -> dict[str, object] | None:
    """Return the curve of a run; ``None`` if it has done no step, or its series is gone."""
    losses = _series(run, "losses")
    if not len(losses):
        return None
    seconds = _series(run, "slowest_seconds")
    kept = _thinned(seconds, losses)
    return {"number": number, "step": (kept + 1).tolist(), "seconds": _json(seconds[kept]), "loss": _json(losses[kept])}


def _series(run: RunRecord, name: str) -> np.ndarray:
    """Return a series of a run; empty if only the results of the sweep were kept, or the file is damaged."""
    try:
        return Run(run, Path(run.directory)).series(name)
    except (FileNotFoundError, Damaged):
        return np.empty(0)


def _damage(run: RunRecord) -> str | None:
    """Return what is wrong with the series of a run, if it is damaged."""
    if (run.steps or 0) > MOST_LOST:  # otherwise it cannot be damaged: do not read the file again
        try:
            Run(run, Path(run.directory)).series("losses")
        except FileNotFoundError:
            pass
        except Damaged as damage:
            return str(damage)
    return None


def _thinned(*curves: np.ndarray) -> np.ndarray:
    """Return the steps to draw, ``[points]``: all, or from equal parts of the run the extremes and the last step."""
    count = len(curves[0])
    if count <= _POINTS:
        return np.arange(count)
    parts = np.array_split(np.arange(count), _POINTS // (2 * len(curves) + 1))
    kept = [0, *(part[-1] for part in parts)]
    for values in curves:
        finite = values[np.isfinite(values)]
        known = np.where(np.isfinite(values), values, np.median(finite) if len(finite) else 0.0)  # no extremes
        kept += [part[found] for part in parts for found in (known[part].argmin(), known[part].argmax())]
    return np.unique(kept)


def _json(values: np.ndarray) -> list[float | None]:
    """Round to seven significant digits, the precision of fp32; ``None`` if not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def schedules(rows: Mapping[int, columns.Row]) -> list[dict[str, object]]:
    """Return the schedules of the first pipelines that have a trace: ``number``, ``passes``, and ``lines`` of text."""
    pipelines = {number: row.run for number, row in rows.items() if (row.run.layout.pipeline or 1) > 1}
    paths = [(number, Path(run.directory) / perfetto.NAME) for number, run in pipelines.items() if not run.kind]
    traced = [(number, path) for number, path in paths if path.exists()][:_PIPELINES]
    return [
        {"number": number, "passes": passes, "lines": [f"{rows[number].name}, {one}" for one in schedule.lines(passes)]}
        for number, passes in ((number, schedule.read(path)) for number, path in traced)
        if passes
    ]


def _agreement(runs: Mapping[str, RunRecord]) -> Iterator[str]:
    """Yield how far the losses of the same training, by name, are from the first, over their common steps."""
    losses = {name: found for name, run in runs.items() if len(found := _series(run, "losses"))}
    broken = {
        name: int(np.argmin(np.isfinite(found))) for name, found in losses.items() if not np.isfinite(found).all()
    }
    whole = {name: found for name, found in losses.items() if name not in broken}
    if len(whole) > 1:
        (first, expected), *others = whole.items()
        apart = {name: _apart(found, expected) for name, found in others}
        lengths = {*map(len, whole.values())}
        steps = plural(lengths.pop(), "step") if len(lengths) == 1 else "common steps"
        yield f"{_compared(apart, first, rounding(runs[first]))} ({plural(len(others), 'row')}, {steps})"
    if broken:
        named = listed([f"{name} from step {step + 1}" for name, step in broken.items()])
        yield f"losses missing or not finite: {named}"


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest relative difference over common steps."""
    steps = min(len(one), len(other))
    difference = np.abs(one[:steps] - other[:steps])
    size = np.maximum(np.abs(other[:steps]), np.finfo(float).tiny)
    return float(np.max(difference / size, initial=0.0))


def _compared(apart: Mapping[str, float], reference: str, bound: float) -> str:
    """``losses agree with ddp within 3.1e-06``; else which differ by more than rounding explains, and how much."""
    far = sorted((name for name in apart if apart[name] > bound), key=lambda name: -apart[name])
    most = max((size for size in apart.values() if size <= bound), default=None)
    near = f"within {most:.1e}" if most else "exactly"
    if not far:
        return f"losses agree with {reference} {near}"
    named = listed([f"{name} {apart[name]:.2g}" for name in far])
    return f"losses differ from {reference}, relative: {named}{'' if most is None else f', others {near}'}"


#: Maximum number of links to draw; with more, the fastest and the slowest ones.
_LINKS = 12

#: Bytes per element.
_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


class Trace(Struct):
    """A line of a figure, or points."""

    name: str
    x: list[float]
    y: list[float]
    text: list[str] | None = None  #: A label for each point.


class Figure(Struct):
    """A figure of the page."""

    title: str
    x: str  #: The title of this axis.
    y: str  #: The title of the other axis.
    lines: list[Trace]
    bounds: list[Trace]  #: Bounds that the lines are below.


def workload_curves(record: RunRecord) -> list[Figure]:
    """Return the figures of a run; empty if its workload has none, or its results are malformed."""
    draw, results = _OF.get(record.workload), record.written.get(record.workload)
    try:
        return draw(results) if draw and results else []
    except (LookupError, TypeError, ValueError, ArithmeticError):  # their types are not in the schema
        return []


def _collectives(written: object) -> list[Figure]:
    """Plot bus bandwidth by size."""
    results = convert(written, Collectives).results
    points = grouped((name_of_series(result), (result.bytes, result.busbw)) for result in results if result.busbw)
    return _by_size("Collectives", "bus bandwidth", points)


def _p2p(written: object) -> list[Figure]:
    """Plot the bandwidth of links by size."""
    pairs = [pair for pair in convert(written, P2P).pairs if pair.sizes]
    pairs.sort(key=lambda pair: -(pair.bandwidth or 0.0))
    if len(pairs) > _LINKS:
        pairs = pairs[: _LINKS // 2] + pairs[-_LINKS // 2 :]
    links = {
        f"rank {pair.source} to {pair.target}": [(size.bytes, size.bandwidth) for size in pair.sizes] for pair in pairs
    }
    return _by_size("Links between ranks", "bandwidth", links)


def _by_size(title: str, y: str, points: Mapping[str, Sequence[tuple[float, float]]]) -> list[Figure]:
    lines = [Trace(name, [x for x, _ in line], [y / 1e9 for _, y in line]) for name, line in points.items()]
    return [Figure(title, "bytes", f"{y} (GB/s)", lines, [])] if lines else []


def _matmul(written: object) -> list[Figure]:
    """Plot a roofline: rates of products, below the bounds of memory and of the fastest product.

    After S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", Communications of the ACM 52, 2009. The traffic of a product is that of its three matrices, once.
    """
    ranks = convert(written, Matmul).ranks
    rates = grouped(((of.dtype, of.shape), of.median) for rank in ranks for of in rank.products)
    points = grouped(
        (dtype, (_intensity(shape, dtype), median(of_ranks), shape)) for (dtype, shape), of_ranks in rates.items()
    )
    copies = [copy.median for rank in ranks for copy in rank.copies if copy.kind == "within the device"]
    lines, bounds = [], []
    for dtype, of_dtype in points.items():
        x, y, shapes = map(list, zip(*sorted(of_dtype), strict=True))
        lines.append(Trace(dtype, x, [rate / 1e9 for rate in y], shapes))
        if copies:
            bounds.append(_roof(f"{dtype} roof", x, max(y), median(copies)))
    axes = ("FLOP per byte of memory traffic", "GFLOP/s of a rank")
    return [Figure("Matrix products: roofline", *axes, lines, bounds)] if lines else []


def _roof(name: str, intensities: Sequence[float], fastest: float, bandwidth: float) -> Trace:
    """Return the roof: memory bandwidth times intensity, up to the fastest product of the dtype."""
    ridge = fastest / bandwidth
    x = sorted({min(*intensities, ridge / 4), ridge, max(*intensities, ridge)})
    return Trace(name, x, [min(bandwidth * one, fastest) / 1e9 for one in x])


def _intensity(shape: str, dtype: str) -> float:
    m, n, k = map(int, shape.split("x"))
    return 2 * prod((m, n, k)) / (_BYTES[dtype] * (m * k + k * n + m * n))


_OF = {"collectives": _collectives, "p2p": _p2p, "matmul": _matmul}


class Point(NamedTuple):
    """A row of a table as a point of a scaling curve."""

    number: int  #: The number of the row.
    rate: float  #: Its throughput.
    ranks: int  #: Its number of ranks.
    batch: int  #: Its global batch.
    parallel: str | None  #: Its choice of ``parallel``.
    nodes: int  #: Its number of nodes; 0 if unknown.
    sweep: Path  #: Its sweep.


class Curve(Struct):
    """A curve of scaling."""

    kind: Literal["strong", "weak"]  #: Whether the global batch is constant, or that per rank.
    name: str  #: Its name.
    rows: list[int]  #: Its rows by their numbers, from the fewest ranks to the most.
    efficiency: list[float]  #: The throughput per rank of each row relative to the first row.


def points(rows: Mapping[int, columns.Row]) -> list[Point]:
    """Return the points of rows, by their numbers; rows without throughput have none."""
    return [
        Point(number, row.place.rate, run.world_size, run.global_batch, run.parallel, len(run.nodes), sweep_of(run))
        for number, row in rows.items()
        if (run := row.run) and row.place.rate and run.world_size and run.global_batch
    ]


def scaling_curves(points: Sequence[Point], options: Mapping[str, Sequence[str | None]]) -> list[Curve]:
    """Return the curves of strong and of weak scaling, of each the one with the highest throughput first.

    ``points`` are of one model; ``options``: those that vary, with a value for each row.
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
        curves = [curve for group in alike.values() for curve in _divided(group, options) if len(curve) > 1]
        for curve in sorted(curves, key=lambda curve: -max(point.rate for point in curve)):
            first = curve[0]
            values = {name: options[name][first.number] for name in kept if name != "parallel"}
            words = [f"{name.rpartition('.')[2]}={text}" for name, text in values.items() if text]
            name = ", ".join([" ".join([str(first.parallel), *words]), form.format(size(first))])
            efficiency = [point.rate / point.ranks / (first.rate / first.ranks) for point in curve]
            drawn.append(Curve(kind, name, [point.number for point in curve], efficiency))
    return drawn


def _divided(group: Sequence[Point], options: Mapping[str, Sequence[str | None]]) -> Iterator[Sequence[Point]]:
    """Divide points into as few curves as possible, with one point for each number of ranks.

    They are divided by degrees, micro-batches, nodes and sweeps, in this order, as long as a curve has two points for a
    number of ranks; of points that still have the same number, the fastest counts.
    """

    def values(*names: str) -> Callable[[Point], Hashable]:
        return lambda point: tuple(options[name][point.number] for name in names if name in options)

    parts: list[Sequence[Point]] = [group]
    for key in (
        values(*options_affecting("degree")),
        values(*options_affecting("batch")),
        attrgetter("nodes"),
        attrgetter("sweep"),
    ):
        parts = [part for points in parts for part in _parts(points, key)]
    for points in parts:
        fastest = {point.ranks: point for point in sorted(points, key=attrgetter("rate"))}
        yield [fastest[ranks] for ranks in sorted(fastest)]


def _parts(points: Sequence[Point], key: Callable[[Point], Hashable]) -> Sequence[Sequence[Point]]:
    """Divide points that are not a curve yet, unless no part would have two numbers of ranks, and so be a curve."""
    if len({point.ranks for point in points}) == len(points):
        return [points]
    parts = [*grouped((key(point), point) for point in points).values()]
    return parts if any(len({point.ranks for point in part}) > 1 for part in parts) else [points]
