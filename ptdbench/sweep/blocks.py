"""Repeats: which are refused, and when ``repeat=auto`` stops; for their order see :func:`ptdbench.setup.runs.order`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ptdbench.comparison import ranking, significance
from ptdbench.comparison.ranking import Alternative
from ptdbench.comparison.significance import Difference
from ptdbench.problems import Problem, require
from ptdbench.records import store
from ptdbench.report.labels import names
from ptdbench.setup import runs
from ptdbench.setup.commandline import SWEEPER
from ptdbench.setup.compose import Composed
from ptdbench.setup.config import Repeat
from ptdbench.setup.hydra_interface import undecided
from ptdbench.terminal import command, echo, plural


def check(composed: Composed, goes_on: Path | None) -> None:
    """Refuse repeats that are impossible, or would reorder the runs of a resumed sweep."""
    first = composed.configs[0]
    repeat = first.repeat
    if goes_on and composed.is_sweep:
        require(_reordered(goes_on, repeat))
    if repeat.runs != 1:
        require(_unfit(composed, repeat))
    if repeat.runs == "auto" and repeat.block is None:
        require(*undecided("repeat=auto", composed.configs))


def _reordered(sweep: Path, repeat: Repeat) -> Problem | None:
    """Find a resumed sweep whose directories would be assigned to other runs."""
    for directory in store.run_directories(sweep):
        try:
            record = store.read_record(directory)
        except (OSError, store.Damaged):
            continue
        was = record.option("repeat.runs", int | str) not in (None, 1)
        if was == (repeat.runs != 1):
            return None
        rule = f"was begun {'with' if was else 'without'} repeats, and its runs would have another order now"
        return Problem("sweep.resume", sweep, rule, "start another sweep")
    return None


def _unfit(composed: Composed, repeat: Repeat) -> Problem | None:
    times = repeat.runs
    if not composed.is_sweep:
        return Problem("repeat.runs", times, "several runs are a sweep", f"add -m, as in {command()} -m repeat={times}")
    if composed.searches:
        rule = f"{SWEEPER}={composed.sweeper} chooses each run by the results of others, and repeats none"
        return Problem("repeat.runs", times, rule, "omit it, and repeat the best runs in a sweep of their own")
    if repeat.block is not None and repeat.block >= runs.blocks(repeat):
        rule = f"there are {runs.blocks(repeat)} blocks, which count from 0"
        return Problem("repeat.block", repeat.block, rule, "omit it for all of them")
    return None


@dataclass(frozen=True)
class Compared:
    """Two alternatives whose order matters; ``called`` names the pair if their configurations' names would not."""

    first: Alternative
    second: Alternative
    called: str | None = None

    def __str__(self) -> str:
        return self.called or " and ".join(names([self.first.median_run, self.second.median_run]))


def all_of_sweep(directory: Path, blocks: int) -> list[Compared]:
    """Return every pair of a sweep's comparable alternatives, from its first ``blocks`` blocks only."""
    earlier = [run for run in store.read_results(directory) if (run.option("repeat.block", int) or 0) < blocks]
    measured = [alternative for alternative in ranking.group_runs(earlier) if alternative.sample]
    return [Compared(*pair) for group in ranking.comparable(measured) for pair in combinations(group, 2)]


@dataclass
class StoppingRule:
    """The stopping rule of ``repeat=auto``, called before each block; it decides at a few of them.

    Frequent looks would find differences where there are none: the looks are few, fixed in advance, and share the level
    (:func:`ptdbench.comparison.significance.interim_looks`).
    """

    repeat: Repeat  #: The options.
    #: Returns the pairs to compare in a directory after a number of blocks.
    compared: Callable[[Path, int], Sequence[Compared]] = all_of_sweep
    _is_over: bool = False

    def __call__(self, directory: Path, blocks: int) -> bool:
        """Return whether no further block is needed."""
        if self._is_over or blocks not in significance.interim_looks(self.repeat.max):
            return self._is_over
        pairs = self.compared(directory, blocks)
        differences = ranking.differences([(pair.first, pair.second) for pair in pairs])
        still = [pair for pair, is_open in zip(pairs, unsettled(differences, self.repeat), strict=True) if is_open]
        self._is_over = not still
        progress = f"{plural(blocks, 'block')} of at most {self.repeat.max}"
        if still:
            named = "; ".join(map(str, still[:3]))
            more = f", and {plural(len(still) - 3, 'other pair')}" if len(still) > 3 else ""
            echo(f"{progress}: not settled between {named}{more}", sys.stderr)
        else:
            echo(f"{progress}: {'settled' if pairs else 'nothing to compare'}", sys.stderr)
        return self._is_over


def unsettled(differences: Sequence[Difference | None], repeat: Repeat) -> list[bool]:
    """Return for each pair whether it is unsettled: neither known to differ, nor to be ``repeat.tied_within``."""
    level = significance.level_of_look(repeat.max)

    def is_tied(apart: Difference) -> bool:
        interval = significance.compare(apart, level)
        return max(interval.high, 1 / interval.low) <= 1 + repeat.tied_within

    signs = significance.differing(differences, level)
    return [not sign and not (apart and is_tied(apart)) for apart, sign in zip(differences, signs, strict=True)]
