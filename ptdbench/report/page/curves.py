"""Curves of a report: steps and loss, results of other workloads, and throughput by number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from operator import itemgetter
from statistics import median
from typing import Any, cast

import numpy as np

from ptdbench.grouping import grouped
from ptdbench.records.effects import affects, options_affecting
from ptdbench.records.load import MOST_LOST, Run
from ptdbench.records.schema import Written
from ptdbench.records.store import Damaged
from ptdbench.report import columns
from ptdbench.report.remarks import listed, rounding, training
from ptdbench.report.workload_tables import name_of_series
from ptdbench.terminal import plural

#: Maximum number of rows with curves: more could not be told apart.
_ROWS = 40

#: Maximum number of points of a curve.
_POINTS = 400


def of_steps(rows: Mapping[int, columns.Row]) -> dict[str, Any]:
    """Return the curves of the first measured rows, and remarks on the losses of all; ``rows`` are keyed by number.

    Returns:
        ``steps``: for each of the first rows with any steps, ``number``, ``step`` (points of the curves, counted from
        1), ``seconds`` of the slowest rank and ``loss``; null: unknown. ``losses``: lines on whether losses agree.
        ``drawn``: the maximum number of rows with curves.
    """
    rows = {number: row for number, row in rows.items() if not row.run.get("kind")}  # others have no times or losses
    drawn = [curve for number in list(rows)[:_ROWS] if (curve := _curve(number, rows[number].run))]
    alike = grouped((training(row.run), (row.name, row.run)) for row in rows.values())
    said = [line for group in alike.values() if len(group) > 1 for line in _agreement(dict(group))]
    said += [f"{row.name}: {damage}" for row in rows.values() if (damage := _damage(row.run))]
    return {"steps": drawn, "losses": said, "drawn": _ROWS}


def _curve(number: int, run: Written) -> dict[str, Any] | None:
    """Return the curve of a run; ``None`` if it has done no step, or its series is gone."""
    losses = _series(run, "losses")
    if not len(losses):
        return None
    seconds = _series(run, "slowest_seconds")
    kept = _thinned(seconds, losses)
    return {"number": number, "step": (kept + 1).tolist(), "seconds": _json(seconds[kept]), "loss": _json(losses[kept])}


def _series(run: Written, name: str) -> np.ndarray:
    """Return a series of a run; empty if only the results of the sweep were kept, or the file is damaged."""
    try:
        return cast("Run", run).series(name)
    except (FileNotFoundError, Damaged):
        return np.empty(0)


def _damage(run: Written) -> str | None:
    """Return what is wrong with the series of a run, if it is damaged."""
    with suppress(FileNotFoundError):
        try:
            if (run.get("steps") or 0) > MOST_LOST:  # otherwise it cannot be damaged: do not read the file again
                cast("Run", run).series("losses")
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


def _agreement(runs: Mapping[str, Written]) -> Iterator[str]:
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
        yield f"losses not finite or not on record: {named}"


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

#: A figure: ``title``, the axes ``x`` and ``y``, and ``lines`` with the points of each.
Figure = dict[str, Any]


def workload_curves(record: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a run; empty if its workload has none, or its results are malformed."""
    draw = _OF.get(str(record.get("workload")))
    found = record.get(str(record.get("workload")))
    try:
        return draw(found) if draw and found else []
    except (LookupError, TypeError, ValueError, ArithmeticError):  # their types are not in the schema
        return []


def _collectives(found: Mapping[str, Any]) -> list[Figure]:
    """Plot bus bandwidth by size."""
    results = ((name_of_series(one), (one["bytes"], one["busbw"])) for one in found["results"] if one["busbw"])
    return _by_size("Collectives", "bus bandwidth", grouped(results))


def _p2p(found: Mapping[str, Any]) -> list[Figure]:
    """Plot the bandwidth of links by size."""
    pairs = sorted((pair for pair in found["pairs"] if pair["sizes"]), key=lambda pair: -(pair["bandwidth"] or 0.0))
    if len(pairs) > _LINKS:
        pairs = pairs[: _LINKS // 2] + pairs[-_LINKS // 2 :]
    links = {
        f"rank {pair['source']} to {pair['target']}": [(size["bytes"], size["bandwidth"]) for size in pair["sizes"]]
        for pair in pairs
    }
    return _by_size("Links between ranks", "bandwidth", links)


def _by_size(title: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> list[Figure]:
    drawn = [
        {"name": name, "x": [x for x, _ in points], "y": [y / 1e9 for _, y in points], "text": None}
        for name, points in lines.items()
    ]
    return [{"title": title, "x": "bytes", "y": f"{y} (GB/s)", "lines": drawn, "bounds": []}] if drawn else []


def _matmul(found: Mapping[str, Any]) -> list[Figure]:
    """Plot a roofline: rates of products, below the bounds of memory and of the fastest product.

    After S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", Communications of the ACM 52, 2009. The traffic of a product is that of its three matrices, once.
    """
    products = [product for rank in found["ranks"] for product in rank["products"]]
    rates = grouped(((one["dtype"], one["shape"]), one["median"]) for one in products)
    lines = grouped(
        (dtype, (_intensity(shape, dtype), median(of_ranks), shape)) for (dtype, shape), of_ranks in rates.items()
    )
    drawn = [
        {"name": dtype, **dict(zip(("x", "y", "text"), map(list, zip(*sorted(points), strict=True)), strict=True))}
        for dtype, points in lines.items()
    ]
    copies = [c["median"] for rank in found["ranks"] for c in rank["copies"] if c["kind"] == "within the device"]
    bounds = [_roof(line, median(copies)) for line in drawn if copies]
    for line in drawn:
        line["y"] = [rate / 1e9 for rate in line["y"]]
    axes = {"x": "FLOP per byte of memory traffic", "y": "GFLOP/s of a rank"}
    return [{"title": "Matrix products: roofline", **axes, "lines": drawn, "bounds": bounds}] if drawn else []


def _roof(line: Mapping[str, Any], bandwidth: float) -> Figure:
    """Return the roof: memory bandwidth times intensity, up to the fastest product of the dtype."""
    fastest = max(line["y"])
    ridge = fastest / bandwidth
    x = sorted({min(*line["x"], ridge / 4), ridge, max(*line["x"], ridge)})
    return {"name": f"{line['name']} roof", "x": x, "y": [min(bandwidth * one, fastest) / 1e9 for one in x]}


def _intensity(shape: str, dtype: str) -> float:
    m, n, k = map(int, shape.split("x"))
    return 2 * prod((m, n, k)) / (_BYTES[dtype] * (m * k + k * n + m * n))


_OF: dict[str, Callable[[Mapping[str, Any]], list[Figure]]]
_OF = {"collectives": _collectives, "p2p": _p2p, "matmul": _matmul}


Row = Mapping[str, Any]


def scaling_curves(rows: Iterable[Row], options: Mapping[str, Sequence[str | None]]) -> list[dict[str, Any]]:
    """Return curves of strong scaling, where the global batch is constant, and weak scaling, where that per rank is.

    ``rows`` are of one model, and those without throughput are ignored; ``options``: those that vary, with a value for
    each row.

    Returns:
        ``kind`` (``strong`` or ``weak``), ``name``, ``rows`` by their numbers, from the fewest ranks to the most, and
        ``efficiency``: for each row the throughput per rank relative to the first row. For each kind the curve with the
        highest throughput comes first.
    """
    measured = [row for row in rows if row["rate"] and row["ranks"] and row["batch"]]
    options = {  # the others differ between models only
        name: texts for name, texts in options.items() if len({texts[row["number"]] for row in measured}) > 1
    }
    kept = [name for name in options if not affects(name, "degree", "ranks", "batch")]  # not about a size
    found = []
    for kind, size in (("strong", itemgetter("batch")), ("weak", lambda row: row["batch"] / row["ranks"])):
        alike = grouped(
            ((size(row), row["parallel"], *(options[name][row["number"]] for name in kept)), row) for row in measured
        )
        curves = [curve for group in alike.values() for curve in _divided(group, options)]
        curves = sorted((one for one in curves if len(one) > 1), key=lambda one: -max(row["rate"] for row in one))
        for curve in curves:
            first = curve[0]
            known = {name: options[name][first["number"]] for name in kept if name != "parallel"}
            words = [f"{name.rpartition('.')[2]}={text}" for name, text in known.items() if text]
            batch = f"batch {size(first):g}" if kind == "strong" else f"{size(first):g} a rank"
            found.append({
                "kind": kind,
                "name": ", ".join([" ".join([str(first["parallel"]), *words]), batch]),
                "rows": [row["number"] for row in curve],
                "efficiency": [row["rate"] / row["ranks"] / (first["rate"] / first["ranks"]) for row in curve],
            })  # fmt: skip
    return found


def _divided(group: Sequence[Row], options: Mapping[str, Sequence[str | None]]) -> Iterable[Sequence[Row]]:
    """Divide rows into as few curves as possible, with one row for each number of ranks.

    They are divided by degrees, micro-batches, nodes and sweeps, in this order, as long as a curve has two rows for a
    number of ranks; of rows that still have the same number, the fastest counts.
    """

    def values(*names: str) -> Callable[[Row], Hashable]:
        return lambda row: tuple(options[name][row["number"]] for name in names if name in options)

    waiting = [list(group)]
    for key in (
        values(*options_affecting("degree")),
        values(*options_affecting("batch")),
        itemgetter("nodes"),
        itemgetter("sweep"),
    ):
        waiting = [part for rows in waiting for part in _parts(rows, key)]
    for one in waiting:
        fastest = {row["ranks"]: row for row in sorted(one, key=lambda row: row["rate"])}
        yield [fastest[ranks] for ranks in sorted(fastest)]


def _parts(rows: list[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    """Divide rows that are not a curve yet, unless no part would have two numbers of ranks, and so be a curve."""
    if len({row["ranks"] for row in rows}) == len(rows):
        return [rows]
    parts = [*grouped((key(row), row) for row in rows).values()]
    return parts if any(len({row["ranks"] for row in part}) > 1 for part in parts) else [rows]
