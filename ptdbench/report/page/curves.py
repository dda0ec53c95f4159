"""What runs did step by step: how long steps took, and how the loss fell."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ptdbench.records.bearing import bears
from ptdbench.records.load import MOST_LOST, Run
from ptdbench.records.schema import Written
from ptdbench.records.store import Damaged
from ptdbench.report.losses import listed
from ptdbench.terminal import plural

#: Curves of so many rows are drawn: of more, none can be told from another.
_ROWS = 40

#: Points of a curve at most.
_POINTS = 400

#: Losses whose relative difference is below this lie on one curve: what the rounding of fp32 makes of the same numbers.
_EQUAL = 1e-5


def of_steps(
    rows: Mapping[int, Written], called: Mapping[int, str], options: Mapping[str, Sequence[str | None]]
) -> dict[str, Any]:
    """The curves of the first rows, and what is said of the losses of all.

    Args:
        rows: The typical run of each row, by its number.
        called: What each is called.
        options: The varying options, with a value for each row by its number.

    Returns:
        ``steps``: for each of the first rows that has done any ``number``, ``step`` (points of the curves, counted from
        1), ``seconds`` of the slowest rank and ``loss``; null is unknown. ``losses``: lines on whether they agree.
        ``drawn``: how many rows there are curves of at most.
    """
    drawn = [curve for number in list(rows)[:_ROWS] if (curve := _curve(number, rows[number]))]
    alike: dict[Hashable, list[int]] = {}
    for number in rows:
        alike.setdefault(_training(number, options), []).append(number)
    groups = [numbers for numbers in alike.values() if len(numbers) > 1]
    said = [line for group in groups for line in _agreement(group, rows, called)]
    said += [f"{called[number]}: {damage}" for number, run in rows.items() if (damage := _damage(run))]
    return {"steps": drawn, "losses": said, "drawn": _ROWS}


def _curve(number: int, run: Written) -> dict[str, Any] | None:
    """``None`` for a run that has done no step, or whose series are gone."""
    losses = _series(run, "losses")
    if not len(losses):
        return None
    seconds = _series(run, "slowest_seconds")
    kept = _thinned(seconds)
    return {"number": number, "step": (kept + 1).tolist(), "seconds": _json(seconds[kept]), "loss": _json(losses[kept])}


def _series(run: Written, name: str) -> np.ndarray:
    """Empty where only the results of the sweep were kept, or the file is damaged."""
    try:
        return cast("Run", run).series(name)
    except (FileNotFoundError, Damaged):
        return np.empty(0)


def _damage(run: Written) -> str | None:
    """What is wrong with the series of a run that are on record."""
    if (run.get("steps") or 0) <= MOST_LOST:  # nothing can be, and no file is read once more
        return None
    try:
        cast("Run", run).series("losses")
    except (FileNotFoundError, Damaged) as damage:
        return str(damage) if isinstance(damage, Damaged) else None
    return None


def _thinned(values: np.ndarray) -> np.ndarray:
    """``[points]``: which steps to draw: all, or of equal parts of the run the lowest, the highest and the last."""
    if len(values) <= _POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), _POINTS // 3)
    shown = np.where(np.isnan(values), 0.0, values)
    extremes = [part[found] for part in parts for found in (shown[part].argmin(), shown[part].argmax(), -1)]
    return np.unique([0, *extremes])


def _json(values: np.ndarray) -> list[float | None]:
    """Seven significant digits, which is what fp32 has."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def _training(number: int, options: Mapping[str, Sequence[str | None]]) -> Hashable:
    """Equal for two rows if and only if their losses should be: what they train differs in no option."""
    return tuple(values[number] for name, values in options.items() if not bears(name, "layout"))


def _agreement(group: Sequence[int], rows: Mapping[int, Written], called: Mapping[int, str]) -> Iterator[str]:
    """How far the losses of the same training lie from those of its first row, as far as both have come."""
    losses = {number: found for number in group if len(found := _series(rows[number], "losses"))}
    broken = {
        number: int(np.argmin(np.isfinite(found))) for number, found in losses.items() if not np.isfinite(found).all()
    }
    whole = [number for number in losses if number not in broken]
    if len(whole) > 1:
        first, *others = whole
        apart = {number: _apart(losses[number], losses[first]) for number in others}
        lengths = {len(losses[number]) for number in whole}
        steps = plural(lengths.pop(), "step") if len(lengths) == 1 else "common steps"
        yield f"{_compared(apart, called, called[first])} ({plural(len(others), 'row')}, {steps})"
    if broken:
        named = listed([f"{called[number]} from step {step + 1}" for number, step in broken.items()])
        yield f"losses not finite or not on record: {named}"


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest relative difference at a step that both did."""
    steps = min(len(one), len(other))
    difference = np.abs(one[:steps] - other[:steps])
    size = np.maximum(np.abs(other[:steps]), np.finfo(float).tiny)
    return float(np.max(difference / size, initial=0.0))


def _compared(apart: Mapping[int, float], called: Mapping[int, str], reference: str) -> str:
    """``losses agree with ddp within 3.1e-06``; else which are how far away."""
    far = sorted((number for number in apart if apart[number] > _EQUAL), key=lambda number: -apart[number])
    if not far:
        most = max(apart.values())
        return f"losses agree with {reference} {f'within {most:.1e}' if most else 'exactly'}"
    named = listed([f"{called[number]} {apart[number]:.2g}" for number in far])
    rest = f", others within {_EQUAL:.0e}" if len(far) < len(apart) else ""
    return f"losses differ from {reference}, relative: {named}{rest}"
