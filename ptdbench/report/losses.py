"""Losses of runs of the same training: equal, as far as rounding lets them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Hashable, Iterator, Sequence

from ptdbench.records.bearing import bears
from ptdbench.records.record import option
from ptdbench.records.schema import Environment, Written, part
from ptdbench.report.labels import options
from ptdbench.terminal import plural

#: By how much of itself rounding may change a loss within ten steps, by precision; other kernels add up otherwise.
_ROUNDING = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}

#: Steps add to it as independent errors do, up to this share; beyond it another training cannot be told from rounding.
_MOST = 5e-2

#: Configurations that a line names.
_NAMED = 5


def training(run: Written) -> Hashable:
    """Equal for two runs if and only if their losses should be: the same training on the same data, equally long."""
    found = options(run)
    kept = {name: value for name, value in found.items() if not bears(name, "layout")}
    return run.get("steps"), _python_that_is_read(run), json.dumps(kept, sort_keys=True, default=str)


def rounding(run: Written) -> float:
    """Return by how much of itself the last loss of a run may change by rounding."""
    of_ten = _ROUNDING.get(str(run.get("precision")), _MOST)
    return min(of_ten * math.sqrt(max(1.0, (run.get("steps") or 0) / 10)), _MOST)


def apart(before: Sequence[Written], after: Sequence[Written]) -> str | None:
    """Return how far the last losses of one configuration lie apart on two sides; ``None`` where rounding explains it.

    Runs of one side may differ as well, where the order of additions is not fixed: what counts is the gap between all
    losses of one side and all of the other.
    """
    sides = [
        [run for run in side if run["status"] == "ok" and run.get("final_loss") is not None] for side in (before, after)
    ]
    if not all(sides) or len({(run.get("steps"), _python_that_is_read(run)) for side in sides for run in side}) > 1:
        return None
    one, other = ([run["final_loss"] for run in side] for side in sides)
    gap = max(min(one) - max(other), min(other) - max(one))
    size, most = max(map(abs, [*one, *other])), rounding(sides[0][0])
    if gap <= most * size:
        return None
    losses = f"{_range_text(one)} before and {_range_text(other)} after"
    return f"the last loss is {losses}: {gap / size:.2g} of it apart, where rounding makes {most:.2g} at most"


def remarks(named: Sequence[tuple[str, Written]]) -> Iterator[str]:
    """Configurations, by their names, whose last loss is not that of the first one of the same training."""
    groups: dict[Hashable, list[tuple[str, float]]] = {}
    most = {name: rounding(run) for name, run in named}
    for name, run in named:
        if run.get("final_loss") is not None:
            groups.setdefault(training(run), []).append((name, run["final_loss"]))
    for (first, expected), *others in groups.values():
        apart = {name: abs(loss - expected) / max(abs(expected), sys.float_info.min) for name, loss in others}
        if far := [f"{name} {share:.2g}" for name, share in apart.items() if share > most[name]]:
            yield f"last loss differs from {first}, relative: {listed(far)}"


def listed(words: Sequence[str]) -> str:
    """The first ones, and how many others there are."""
    most = f" and {plural(len(words) - _NAMED, 'other')}" if len(words) > _NAMED else ""
    return f"{', '.join(words[:_NAMED])}{most}"


def _python_that_is_read(run: Written) -> str | None:
    """The version of Python whose library a run was trained on, if it was."""
    data = option(run, "data", dict) or {}
    return part(run, Environment).python if data.get("path", "") is None else None


def _range_text(losses: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{loss:.6g}" for loss in (min(losses), max(losses)))
    return " to ".join(ends)
