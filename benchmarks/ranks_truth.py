"""How often the ranks of a table are wrong, and how often they decide: simulated sweeps, or repeated ``make bench``.

    make ranks-truth                              # simulated sweeps: a minute on a core
    make ranks-truth ARGS="--sweeps 10000"        # each share to 0.4 points: 5 minutes
    make ranks-truth ARGS="--bench 20"            # make bench instead, 20 times: 40 minutes

A run's throughput is its layout's, times the drift of the machine, times an error of its own of 8 %. The drift is that
of 480 runs in ``benchmarks/images/noise.png`` on two busy cores: 7 %, of which two runs that are 15 runs apart share
less than a third. Errors are normal, of Student's t with 3 degrees of freedom, or of layouts whose variances are 3:1;
30:1 and 100:1 for three runs.

Good is at most 5 % of identical layouts told apart, and 95 % of those of ``make bench`` decided. For two layouts
Student's t is exact: half of such shares lie above 5 %. A row of identical ones misses where one so large would be seen
in less than 1 of 100 cases at 5 %.
"""

import math
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.script import ROOT, keep, options
from ptdbench.comparison import ranking, significance
from ptdbench.comparison.ranking import rank
from ptdbench.comparison.significance import LEVEL, Pool, Sample
from ptdbench.records import store
from ptdbench.setup import runs
from ptdbench.setup.config import Repeat

#: Standard deviation of the logarithm of a run's figure: by its error, and by the drift of the machine.
ERROR, DRIFT = 0.08, 0.07

#: Runs after which the drifts of two runs correlate by 1/e.
MEMORY = 15

#: What layouts reach of the fastest one's throughput.
LAYOUTS = (1.0, 0.77, 0.71)

#: How often the first of them has to be decided.
DECIDED = 0.95

#: Repeats of ``make bench``, and seconds in which it has to be done once everything is installed.
BENCH, BENCH_SECONDS = 9, 150.0

Errors = Callable[[np.random.Generator, int, int], np.ndarray]


@dataclass(frozen=True)
class Row:
    """How often something was seen."""

    name: str  #: What was compared.
    seen: int  #: The sweeps in which it was seen.
    tried: int  #: All sweeps.
    rule: str  #: The requirement; empty if there is none.
    is_met: bool

    def __str__(self) -> str:
        low, high = stats.binomtest(self.seen, self.tried).proportion_ci(0.95)
        share = f"{self.seen / self.tried:.1%} of {self.tried} ({low:.1%} to {high:.1%})"
        verdict = f", {self.rule}: {'PASS' if self.is_met else 'MISS'}" if self.rule else ""
        return f"  {self.name:58} {share}{verdict}"


def normal(random: np.random.Generator, layouts: int, repeats: int) -> np.ndarray:
    """Draw errors of runs, by layouts and repeats."""
    return random.normal(0, ERROR, (layouts, repeats))


def heavy(random: np.random.Generator, layouts: int, repeats: int) -> np.ndarray:
    """Draw errors with rare large ones: Student's t with 3 degrees of freedom, whose variance is 3."""
    return ERROR / math.sqrt(3) * random.standard_t(3, (layouts, repeats))


def unequal(random: np.random.Generator, layouts: int, repeats: int, ratio: float = 3, mean: float = 0) -> np.ndarray:
    """Draw normal errors whose variance is ``ratio`` times larger for the first layout; the mean variance is usual."""
    variances = np.where(np.arange(layouts) == 0, float(ratio), 1.0)
    return np.sqrt(variances / (mean or variances.mean()))[:, None] * normal(random, layouts, repeats)


ERRORS: dict[str, Errors] = {"normal": normal, "t3": heavy, "3:1": unequal}

#: The first layout varies so much more than the others that they say nothing about it; theirs is the usual variance.
FAR: dict[str, Errors] = {f"{ratio}:1": partial(unequal, ratio=ratio, mean=1) for ratio in (30, 100)}


def sweep(random: np.random.Generator, shares: Sequence[float], repeats: int, errors: Errors) -> list[Sample]:
    """Simulate a sweep, in the order of its runs; ``shares`` are the true throughputs of the layouts."""
    of_runs = errors(random, len(shares), repeats)
    correlation = math.exp(-1 / MEMORY)
    drift = random.normal(0, DRIFT)
    samples: list[dict[Hashable, float]] = [{} for _ in shares]
    order = runs.order(len(shares), Repeat(repeats, 60, 0.02, int(random.integers(2**31)), None, None))
    for layout, block in order:
        drift = correlation * drift + math.sqrt(1 - correlation**2) * random.normal(0, DRIFT)
        key = layout if block is None else block  # a single run is of no block
        samples[layout][key] = shares[layout] * math.exp(drift + of_runs[layout, block or 0])
    return list(samples)


def is_told_apart(samples: Sequence[Sample], level: float = LEVEL) -> bool:
    """Return whether any two layouts are told apart."""
    return any(significance.faster(Pool(samples), samples, level))


def is_first_decided(samples: Sequence[Sample]) -> bool:
    """Return whether the first layout has the first rank alone."""
    return significance.ranks(significance.faster(Pool(samples), samples))[0] == (1, 1)


def is_told_apart_at_a_look(samples: Sequence[Sample]) -> bool:
    """Return whether any look of ``repeat=auto`` tells two layouts apart, with these runs as the maximum."""
    most = len(samples[0])
    level = significance.level_of_look(most)
    return any(
        is_told_apart([{block: sample[block] for block in range(look)} for sample in samples], level)
        for look in significance.interim_looks(most)
    )


def identical(random: np.random.Generator, sweeps: int) -> Iterator[Row]:
    """Compare identical layouts, in tables of repeats and at the looks of ``repeat=auto``."""
    kinds = [*product(ERRORS, product((2, 3, 8), (2, 3, 5, 9))), *product(FAR, product((3, 8, 15), (3,)))]
    for kind, (layouts, repeats) in kinds:
        seen = _seen(random, sweeps, is_told_apart, [1.0] * layouts, repeats, kind)
        yield _row(f"{layouts} identical x {repeats}, {kind}", seen, sweeps, most=LEVEL)
    for kind in ERRORS:
        seen = _seen(random, sweeps, is_told_apart_at_a_look, [1.0] * 3, 20, kind)
        yield _row(f"3 identical, repeat=auto repeat.max=20, {kind}", seen, sweeps, most=LEVEL)


def decided(random: np.random.Generator, sweeps: int) -> Iterator[Row]:
    """Compare layouts that differ as those of ``make bench``, with as many repeats and with fewer."""
    for kind, repeats in product(ERRORS, (3, 5, 7, BENCH)):
        seen = _seen(random, sweeps, is_first_decided, LAYOUTS, repeats, kind)
        name = f"first of {', '.join(map(str, LAYOUTS))} x {repeats}, {kind}"
        yield _row(name, seen, sweeps, least=DECIDED if repeats == BENCH else 0.0)


def _seen(
    random: np.random.Generator, sweeps: int, sees: Callable[[Sequence[Sample]], bool],
    shares: Sequence[float], repeats: int, kind: str,
) -> int:  # fmt: skip
    """Count the simulated sweeps in which something is seen."""
    return sum(sees(sweep(random, shares, repeats, (ERRORS | FAR)[kind])) for _ in range(sweeps))


def bench(times: int) -> Iterator[Row]:
    """Repeat ``make bench``: does its table name the fastest layout, and in time?"""
    first, seconds = 0, []
    for number in range(times):
        directory = Path("outputs", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_bench-{number}")
        began = time.monotonic()
        subprocess.run(["make", "bench", f"ARGS=hydra.sweep.dir={directory}"], cwd=ROOT, check=True)
        seconds.append(time.monotonic() - began)
        places = rank(ranking.group_runs(store.read_results(ROOT / directory)))
        first += places[0].rank == (1, 1)
    yield _row(f"make bench: first place decided (longest {max(seconds):.0f} s)", first, times, least=0.9)
    in_time = sum(duration <= BENCH_SECONDS for duration in seconds)
    yield _row(f"make bench: done in {BENCH_SECONDS:.0f} s", in_time, times, least=1.0)


def _row(name: str, seen: int, tried: int, most: float = 1.0, least: float = 0.0) -> Row:
    """Return the row of a share with its limit."""
    rule = f"at most {most:.0%}" if most < 1 else f"at least {least:.0%}" if least else ""
    is_more = stats.binomtest(seen, tried, most, "greater").pvalue < 0.01
    return Row(name, seen, tried, rule, least <= seen / tried and not is_more)


def main() -> int:
    """Print the shares; 1 if one of them misses what it should be."""
    args = options(__doc__, sweeps=(1000, "of each kind"), bench=(int, "repeats of make bench instead"))
    random = np.random.default_rng(0)
    simulated = chain(identical(random, args.sweeps), decided(random, args.sweeps))
    rows = []
    for row in bench(args.bench) if args.bench else simulated:
        print(row, flush=True)
        rows.append(row)
    if args.bench:
        keep("bench", ", ".join(f"{row.seen} of {row.tried}" for row in rows))
    for rule in {row.rule for row in rows if row.rule and not args.bench}:
        shares = [row.seen / row.tried for row in rows if row.rule == rule]
        keep(f"ranks: {rule}", f"{min(shares):.1%} to {max(shares):.1%} of {args.sweeps:,}")
    return int(not all(row.is_met for row in rows))
