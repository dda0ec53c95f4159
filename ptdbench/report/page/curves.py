"""What runs did step by step: how long steps took, and how the loss fell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ptdbench.records.load import Run
from ptdbench.terminal import plural

#: Curves of so many rows are drawn: of more, none can be told from another.
_ROWS = 40

#: Points of a curve at most.
_POINTS = 400

#: Losses whose relative difference is below this lie on one curve: what the rounding of fp32 makes of the same numbers.
_EQUAL = 1e-5


def of_steps(rows: Mapping[int, Mapping[str, Any]], called: Mapping[int, str]) -> dict[str, Any]:
    """The curves of the first rows, and what is said of their losses.

    Args:
        rows: The typical run of each row, by its number.
        called: What each is called.

    Returns:
        ``steps``: for each row that has done any ``number``, ``step`` (points of the curves, counted from 1),
        ``seconds`` of the slowest rank and ``loss``; null is unknown. ``losses``: sentences on whether they agree.
        ``drawn``: how many rows there were curves of at most.
    """
    losses: dict[int, np.ndarray] = {}
    curves = []
    for number in list(rows)[:_ROWS]:
        try:
            run = cast("Run", rows[number])
            seconds, loss = run.series("slowest_seconds"), run.series("losses")
        except FileNotFoundError:
            continue  # only the sweep's results were kept
        if not len(loss):
            continue
        kept = _thinned(seconds)
        losses[number] = loss
        curves.append(
            {
                "number": number,
                "step": (kept + 1).tolist(),
                "seconds": _json(seconds[kept]),
                "loss": _json(loss[kept]),
            }
        )
    return {"steps": curves, "losses": _agreement(losses, rows, called), "drawn": _ROWS}


def _thinned(values: np.ndarray) -> np.ndarray:
    """``[points]``: which steps to draw: all, or of equal parts of the run the lowest, the highest and the last."""
    if len(values) <= _POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), _POINTS // 3)
    shown = np.where(np.isnan(values), 0.0, values)
    extremes = [part[found] for part in parts for found in (shown[part].argmin(), shown[part].argmax(), -1)]
    return np.unique(extremes)


def _json(values: np.ndarray) -> list[float | None]:
    """Seven significant digits, which is what fp32 has."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def _agreement(
    losses: Mapping[int, np.ndarray], rows: Mapping[int, Mapping[str, Any]], called: Mapping[int, str]
) -> list[str]:
    """For each global batch, how far the losses of its rows lie from those of the first one."""
    batches: dict[Any, list[int]] = {}
    for number in losses:
        batches.setdefault(rows[number].get("global_batch"), []).append(number)
    return [
        _sentence(batch, {other: _apart(losses[other], losses[first]) for other in others}, called, called[first])
        for batch, (first, *others) in batches.items()
        if others
    ]


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest relative difference at a step that both did; NaN if one of two losses is not finite."""
    steps = min(len(one), len(other))
    return float(np.max(np.abs(one[:steps] - other[:steps]) / np.abs(other[:steps])))


def _sentence(batch: object, found: Mapping[int, float], called: Mapping[int, str], reference: str) -> str:
    far = {number: apart for number, apart in found.items() if not apart <= _EQUAL}
    where = f"batch {batch}: the losses"
    if not any(found.values()):
        return f"{where} of all rows are those of {reference} at every step"
    if not far:
        return f"{where} of all rows follow {reference} within {max(found.values()):.1e} at every step"
    named = ", ".join(
        f"{called[number]} ({'not finite' if np.isnan(apart) else f'{apart:.2g}'})"
        for number, apart in sorted(far.items(), key=lambda pair: -np.nan_to_num(pair[1], nan=np.inf))[:5]
    )
    most = "" if len(far) <= 5 else f", and of {len(far) - 5} others"
    rest = f"; {plural(len(found) - len(far), 'row')} within {_EQUAL:.0e}" if len(far) < len(found) else ""
    return f"{where} of these rows are not those of {reference}, by relative difference: {named}{most}{rest}"
