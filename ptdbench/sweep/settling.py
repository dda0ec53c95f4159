"""When ``repeat=auto`` has gone on for long enough: all that is compared is known to differ, or to be tied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ptdbench.measure import comparison
from ptdbench.measure.comparison import Comparison
from ptdbench.measure.variation import Difference
from ptdbench.records import alternatives, noise, store
from ptdbench.records.alternatives import Alternative
from ptdbench.report.labels import names
from ptdbench.setup.config import Repeat
from ptdbench.terminal import plural, say


@dataclass(frozen=True)
class Compared:
    """Two alternatives whose order matters.

    Attributes:
        one: One of them.
        other: The other one.
        called: What both are called, where the names of their configurations do not tell.
    """

    one: Alternative
    other: Alternative
    called: str | None = None

    def __str__(self) -> str:
        return self.called or " and ".join(names([self.one.typical, self.other.typical]))


def all_of_sweep(directory: Path, blocks: int) -> list[Compared]:
    """Every pair of a sweep's alternatives of the same model, by its first blocks.

    Args:
        directory: The sweep.
        blocks: How many count: a resumed sweep may have later ones.
    """
    earlier = [run for run in store.read_results(directory) if run["config"]["repeat"]["block"] < blocks]
    found = [one for one in alternatives.group(earlier) if one.sample]
    return [
        Compared(one, other)
        for one, other in combinations(found, 2)
        if one.typical.get("model") == other.typical.get("model")
    ]


@dataclass
class Settling:
    """Called before each block, and decides at some of them.

    Looking often would find a difference where there is none: the looks are few, known beforehand, and share the level
    (:func:`ptdbench.measure.comparison.looks`).

    Attributes:
        repeat: The options.
        compared: What matters in a directory after so many blocks.
    """

    repeat: Repeat
    compared: Callable[[Path, int], Sequence[Compared]] = all_of_sweep
    _is_over: bool = False

    def __call__(self, directory: Path, blocks: int) -> bool:
        """Whether no further block is needed."""
        if self._is_over or blocks not in comparison.looks(self.repeat.max):
            return self._is_over
        pairs = self.compared(directory, blocks)
        differences = noise.differences([(pair.one, pair.other) for pair in pairs])
        still = [pair for pair, is_open in zip(pairs, unsettled(differences, self.repeat), strict=True) if is_open]
        self._is_over = not still
        told = f"{plural(blocks, 'block')} of at most {self.repeat.max}"
        if still:
            named = "; ".join(map(str, still[:3]))
            more = f", and {plural(len(still) - 3, 'other pair')}" if len(still) > 3 else ""
            say(f"{told}: not settled between {named}{more}", sys.stderr)
        else:
            say(f"{told}: {'settled' if pairs else 'nothing to compare'}", sys.stderr)
        return self._is_over


def unsettled(differences: Sequence[Difference | None], repeat: Repeat) -> list[bool]:
    """Whether each pair is neither known to differ, nor known to differ by at most ``repeat.tied_within``."""
    level = comparison.level_of_look(repeat.max)
    signs = comparison.differing(differences, level)
    return [
        not sign and not (apart and _is_tied(comparison.compare(apart, level), repeat.tied_within))
        for apart, sign in zip(differences, signs, strict=True)
    ]


def _is_tied(known: Comparison, within: float) -> bool:
    return max(known.high, 1 / known.low) <= 1 + within
