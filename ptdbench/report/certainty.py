"""How sure figures are, in the words of all tables; beyond 2x it is said without figures, which would mean nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ptdbench.measure.comparison import LEVEL, POWER, Comparison, level_of_look
from ptdbench.records.record import option
from ptdbench.records.schema import Degree, Written

#: Shares above this are not told in figures.
_MOST = 1.0

_WIDE = f"±>{_MOST:.0%}"


def level_of(runs: Iterable[Written]) -> float:
    """The level at which runs are judged: smaller where ``repeat=auto`` has looked at them several times."""
    looked = [run for run in runs if option(run, "repeat.runs", str) == "auto"]
    most = [blocks for run in looked if (blocks := option(run, "repeat.max", Degree))]
    return level_of_look(max(most)) if most else LEVEL


def margin_text(margin: float | None) -> str:
    """What follows a figure: `` ±1.8%``, or nothing where nothing is known."""
    if margin is None:
        return ""
    return f" ±{margin:.1%}" if margin <= _MOST else f" {_WIDE}"


def interval_text(known: Comparison | None, decimals: int) -> str:
    """What follows a ratio: `` (0.63-0.67)``, or nothing where nothing is known."""
    if known is None:
        return ""
    if known.high / known.ratio - 1 > _MOST:
        return f" ({_WIDE})"
    return f" ({known.low:.{decimals}f}-{known.high:.{decimals}f})"


def share_text(share: float) -> str:
    """``3.1%``, or ``2x and more``."""
    return f"{share:.1%}" if share <= _MOST else f"{1 + _MOST:.0f}x and more"


def ratio_text(share: float) -> str:
    """``1.2x`` or ``1.031x``, with two digits of what lies above 1; ``no 2x`` where even that means nothing."""
    if share > _MOST:
        return f"no {1 + _MOST:.0f}x"
    decimals = 1 - math.floor(math.log10(share)) if 0 < share < 0.1 else 2
    return f"{1 + share:.{decimals}f}x"


def detectable_text(detectable: float) -> str:
    """``3.1% detectable (90% power)``."""
    return f"{share_text(detectable)} detectable ({POWER:.0%} power)"
