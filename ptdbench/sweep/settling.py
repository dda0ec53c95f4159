"""When ``repeat=auto`` has gone on for long enough: every pair of runs is known to differ, or to be tied."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ptdbench.records import alternatives, store
from ptdbench.records.alternatives import Alternative
from ptdbench.report.labels import names
from ptdbench.setup.config import Repeat
from ptdbench.terminal import plural, say


@dataclass
class Settling:
    """Called before each block, and decides at some of them.

    Looking often would find a difference where there is none: the looks are few, known beforehand, and share the level
    (:func:`ptdbench.measure.comparison.looks`).

    Attributes:
        repeat: The options.
    """

    repeat: Repeat
    _is_over: bool = False

    def __call__(self, sweep_directory: Path, blocks: int) -> bool:
        """Whether no further block is needed.

        Args:
            sweep_directory: Where the results are.
            blocks: Blocks that have been carried out.
        """
        from ptdbench.measure import comparison

        if self._is_over or blocks not in comparison.looks(self.repeat.max):
            return self._is_over
        written = store.read_results(sweep_directory)  # a resumed sweep may have later blocks
        earlier = [run for run in written if run["config"]["repeat"]["block"] < blocks]
        found = [one for one in alternatives.group(earlier) if one.sample]
        open_pairs = unsettled(found, self.repeat)
        self._is_over = not open_pairs
        told = f"{plural(blocks, 'block')} of at most {self.repeat.max}"
        if open_pairs:
            named = [" and ".join(names([one.typical, other.typical])) for one, other in open_pairs[:3]]
            more = f", and {plural(len(open_pairs) - 3, 'other pair')}" if len(open_pairs) > 3 else ""
            say(f"{told}: not settled between {'; '.join(named)}{more}", sys.stderr)
        else:
            say(f"{told}: {'settled' if len(found) > 1 else 'nothing to compare'}", sys.stderr)
        return self._is_over


def unsettled(found: list[Alternative], repeat: Repeat) -> list[tuple[Alternative, Alternative]]:
    """The pairs that are neither known to differ, nor known to differ by at most ``repeat.tied_within``."""
    from ptdbench.measure import comparison

    level = comparison.level_of_look(repeat.max)
    pairs = list(combinations(found, 2))
    signs = comparison.differing([(one.sample, other.sample) for one, other in pairs], level)
    return [
        (one, other)
        for (one, other), sign in zip(pairs, signs, strict=True)
        if not sign and not _is_tied(one, other, repeat.tied_within, level)
    ]


def _is_tied(one: Alternative, other: Alternative, within: float, level: float) -> bool:
    from ptdbench.measure import comparison

    known = comparison.compare(one.sample, other.sample, level)
    return known is not None and max(known.high, 1 / known.low) <= 1 + within
