"""How often ``repeat`` is wrong: identical configurations told apart, and slower ones not seen.

    python benchmarks/compare_truth.py                              # real runs: three quarters of an hour on two cores
    python benchmarks/compare_truth.py --blocks 10                  # fewer
    python benchmarks/compare_truth.py --sweep outputs/<sweep>      # judge those of an earlier call once more
    python benchmarks/compare_truth.py --picture noise.png          # and draw them

One sweep has ten configurations that differ in name alone, one that is slowed by 2 % and one by 5 %
(``benchmarks/slowed.py``), all in each block. Fresh comparisons use each run once. Resampled ones draw other blocks
each time. All are judged by the product's own functions. The shares have exact 95 % intervals (Clopper and Pearson).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scipy import stats

from ptdbench.measure import comparison
from ptdbench.measure.comparison import LEVEL, POWER, Sample
from ptdbench.records import alternatives, store
from ptdbench.records.alternatives import Alternative
from ptdbench.setup.config import Repeat
from ptdbench.sweep.settling import unsettled

ROOT = Path(__file__).parents[1]

#: Pairs of configurations that differ in name alone.
PAIRS = 5

SLOWER = (0.02, 0.05)

#: Runs of each configuration in a comparison with a fixed number of repeats.
RUNS = 5

#: Resampled comparisons of a kind.
TRIES = 200

#: What ``repeat=auto`` is without further options.
AUTO = Repeat(runs="auto", max=20, tied_within=0.02, seed=0, block=None, series=None)


@dataclass(frozen=True)
class Share:
    """How many of several comparisons saw a difference."""

    seen: int
    tried: int

    def __str__(self) -> str:
        interval = stats.binomtest(self.seen, self.tried).proportion_ci(0.95)
        return f"{self.seen} of {self.tried} ({self.seen / self.tried:.1%}; {interval.low:.1%} to {interval.high:.1%})"


def main() -> int:
    """Print the shares; 1 if one of them misses what it should be."""
    options = _parse()
    sweep = options.sweep or _run(options.blocks)
    same, slowed = _by_slowness(sweep)
    blocks = sorted(set.intersection(*(set(one) for one in [*same, *slowed.values()])), key=str)
    spread = comparison.spread_of(same)
    assert spread
    runs = len(same) + len(slowed)
    print(f"{len(blocks)} blocks of {runs} runs; runs of one configuration differ by {spread.deviation:.1%}")
    if options.picture:
        _draw(sweep, options.picture)
    draw = random.Random(0)
    rows = [*_identical(same, blocks, draw), *_slower(same[0], slowed, blocks, draw)]
    for name, share, is_met, rule in rows:
        print(f"  {name:58} {share}, {rule}: {'PASS' if is_met else 'MISS'}")
    return int(not all(is_met for _, _, is_met, _ in rows))


Row = tuple[str, Share, bool, str]


def _identical(same: Sequence[Sample], blocks: Sequence[Hashable], draw: random.Random) -> Iterator[Row]:
    """Configurations that do not differ."""
    pairs = [(same[2 * number], same[2 * number + 1]) for number in range(len(same) // 2)]
    groups = [blocks[start : start + RUNS] for start in range(0, len(blocks) - RUNS + 1, RUNS)]
    fresh = [_differ(one, other, group) for one, other in pairs for group in groups]
    drawn = [draw.sample(same, 2) for _ in range(TRIES)]
    again = [_differ(one, other, draw.sample(blocks, RUNS)) for one, other in drawn]
    auto = [_auto(one, other, _shuffled(blocks, draw))[0] for one, other in drawn]
    for name, seen in (
        (f"identical, {RUNS} fresh runs each", fresh),
        (f"identical, {RUNS} runs each", again),
        ("identical, repeat=auto", auto),
    ):
        share = Share(sum(seen), len(seen))
        low = stats.binomtest(share.seen, share.tried).proportion_ci(0.95).low
        yield name, share, low <= LEVEL, f"at most {LEVEL:.0%} within the interval"


def _slower(
    base: Sample, slowed: dict[float, Sample], blocks: Sequence[Hashable], draw: random.Random
) -> Iterator[Row]:
    """Configurations that do differ."""
    for slower, other in slowed.items():
        tries = [_auto(base, other, _shuffled(blocks, draw)) for _ in range(TRIES)]
        share = Share(sum(seen for seen, _ in tries), TRIES)
        name = f"slower by {slower:.0%}, repeat=auto ({median(used for _, used in tries):.0f} blocks)"
        yield (
            name,
            share,
            share.seen >= POWER * TRIES or slower < max(slowed),
            f"at least {POWER:.0%} of {max(slowed):.0%}",
        )
    slower, other = next(iter(slowed.items()))
    needed = comparison.runs_needed(_of(base, blocks), _of(other, blocks), slower)
    if needed and needed <= len(blocks):
        seen = sum(_differ(base, other, draw.sample(blocks, needed)) for _ in range(TRIES))
        share = Share(seen, TRIES)
        yield (
            f"slower by {slower:.0%}, {needed} runs each, as it states",
            share,
            seen >= POWER * TRIES,
            f"at least {POWER:.0%}",
        )
    else:
        print(f"  a difference of {slower:.0%} takes {needed} runs each, more than the {len(blocks)} blocks here")


def _draw(sweep: Path, path: Path) -> None:
    """The throughput of all runs in their order, as shares of the median of the identical configurations."""
    from matplotlib.figure import Figure

    ordered = sorted(store.read_results(sweep), key=lambda run: run["started"])
    rates = [(run["config"]["model"]["slower"], alternatives.throughput(run)) for run in ordered]
    base = median(rate for slower, rate in rates if rate and slower < min(SLOWER))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    styles = {
        0.0: (".", "0.6", "identical"),
        SLOWER[0]: ("^", "#0072B2", "2 % slower"),
        SLOWER[1]: ("s", "#D55E00", "5 % slower"),
    }
    for kind, (marker, color, label) in styles.items():
        shown = [
            (place, 100 * rate / base) for place, (slower, rate) in enumerate(rates) if rate and _kind(slower) == kind
        ]
        axes.plot(*zip(*shown, strict=True), marker, color=color, label=label, markersize=4)
    axes.set(xlabel="run", ylabel="% of the median throughput")
    axes.legend(loc="lower left", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def _kind(slower: float) -> float:
    return slower if slower in SLOWER else 0.0


def _differ(one: Sample, other: Sample, blocks: Sequence[Hashable]) -> bool:
    return bool(comparison.differing([(_of(one, blocks), _of(other, blocks))])[0])


def _auto(one: Sample, other: Sample, blocks: Sequence[Hashable]) -> tuple[bool, int]:
    """Whether ``repeat=auto`` tells two configurations apart, and how many blocks it takes."""
    looks = [look for look in comparison.looks(AUTO.max) if look <= len(blocks)]
    for look in looks:
        known = [_of(sample, blocks[:look]) for sample in (one, other)]
        if look == looks[-1] or not unsettled([Alternative([], sample) for sample in known], AUTO):
            return bool(comparison.differing([(known[0], known[1])], comparison.level_of_look(AUTO.max))[0]), look
    raise AssertionError("there is a last look")


def _of(sample: Sample, blocks: Sequence[Hashable]) -> dict[Hashable, float]:
    return {block: sample[block] for block in blocks}


def _shuffled(blocks: Sequence[Hashable], draw: random.Random) -> list[Hashable]:
    return draw.sample(blocks, len(blocks))


def _by_slowness(sweep: Path) -> tuple[list[Sample], dict[float, Sample]]:
    """The runs of the identical configurations, and of the others by how much they are slowed."""
    found = alternatives.group(store.read_results(sweep))
    samples: dict[float, Sample] = {one.typical["config"]["model"]["slower"]: one.sample for one in found}
    same = [sample for slower, sample in samples.items() if slower < min(SLOWER)]
    return same, {slower: sample for slower, sample in sorted(samples.items()) if slower >= min(SLOWER)}


def _run(blocks: int) -> Path:
    slower = ",".join(str(one) for one in (*(number / 1e6 for number in range(2 * PAIRS)), *SLOWER))
    sweep = Path("outputs", time.strftime("%Y-%m-%d_%H-%M-%S_compare-truth"))
    words = ["model=gpt_tiny", "model._target_=benchmarks.slowed.Slowed", f"+model.slower={slower}", f"repeat={blocks}"]
    words += ["train.global_batch=4", "train.steps=60", "profile.steps=0", f"hydra.sweep.dir={sweep}"]
    subprocess.run([sys.executable, "train.py", "-m", *words], cwd=ROOT, check=True)
    return ROOT / sweep


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--sweep", type=Path, help="judge the runs of an earlier call")
    parser.add_argument("--picture", type=Path, help="draw the runs")
    options = parser.parse_args()
    if options.blocks < AUTO.max:
        parser.error(f"--blocks {options.blocks}: repeat=auto may take {AUTO.max}; give at least so many")
    return options


if __name__ == "__main__":
    sys.exit(main())
