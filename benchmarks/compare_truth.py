"""How often ``repeat`` is wrong: identical configurations told apart, and slower ones not seen.

    python benchmarks/compare_truth.py                              # real runs: an hour on two cores
    python benchmarks/compare_truth.py --identical 1 --blocks 400   # without identical ones, and more of the others
    python benchmarks/compare_truth.py --sweep outputs/<sweep>      # judge those of an earlier call once more
    python benchmarks/compare_truth.py --picture noise.png          # and draw them

One sweep has ten configurations that differ in name alone, one that is slowed by 2 % and one by 5 %
(``benchmarks/slowed.py``), all in each block. Fresh comparisons use each run once: their share has an exact 95 %
interval (Clopper and Pearson). Resampled ones draw other blocks each time, and share runs: their intervals are
approximate, and too narrow. All are judged by the product's own functions. A row passes by its share alone.

Differences are found as far as the machine's noise allows: the more runs differ, the more blocks it takes, and
``repeat=auto`` ends after ``repeat.max`` of them.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from scipy import stats

from benchmarks.script import parser_of, swept
from ptdbench.comparison import alternatives, significance, variation
from ptdbench.comparison.alternatives import Alternative
from ptdbench.comparison.significance import LEVEL, POWER
from ptdbench.comparison.variation import Difference, Pool, Sample
from ptdbench.records import store
from ptdbench.setup.config import Repeat
from ptdbench.sweep.blocks import unsettled
from ptdbench.terminal import plural

SLOWER = (0.02, 0.05)

#: Runs of each configuration in a comparison with a fixed number of repeats.
RUNS = 5

#: Resampled comparisons of a kind.
TRIES = 200

#: What ``repeat=auto`` is without further options.
AUTO = Repeat(runs="auto", max=60, tied_within=0.02, seed=0, block=None, series=None)


@dataclass(frozen=True)
class Share:
    """How many of several comparisons saw a difference."""

    seen: int  #: They did.
    tried: int  #: All of them.
    is_fresh: bool = False  #: Whether no two of them share a run.

    @property
    def point(self) -> float:
        """Of none it is no number, which is neither enough nor few enough."""
        return self.seen / self.tried if self.tried else math.nan

    def __str__(self) -> str:
        if not self.tried:
            return "0 of 0"
        interval = stats.binomtest(self.seen, self.tried).proportion_ci(0.95)
        kind = "exact" if self.is_fresh else "approximate"
        return f"{self.seen} of {self.tried} ({self.point:.1%}; {kind} {interval.low:.1%} to {interval.high:.1%})"


@dataclass(frozen=True)
class Row:
    """What is printed of some comparisons."""

    name: str  #: What was compared.
    found: Share  #: How many saw a difference.
    rule: str  #: What should be so; empty where nothing is asked.
    is_met: bool  #: Whether it is.

    def __str__(self) -> str:
        verdict = f", {self.rule}: {'PASS' if self.is_met else 'MISS'}" if self.rule else ""
        return f"  {self.name:58} {self.found}{verdict}"


def main() -> int:
    """Print the shares; 1 if one of them misses what it should be."""
    options = _parse()
    auto = replace(AUTO, max=options.max)
    sweep = options.sweep or _run(options)
    same, slowed = _by_slowness(sweep)
    if not same or not slowed:
        sys.exit(f"{sweep}: no results of this benchmark: identical configurations and slower ones")
    blocks = _whole_blocks([*same, *slowed.values()])
    if len(blocks) < auto.max:
        sys.exit(f"{sweep}: {plural(len(blocks), 'block')} in which all runs are ok; at least {auto.max} are needed")
    runs, noise = len(same) + len(slowed), variation.noise(same)
    within = f", within blocks by {noise.paired.deviation:.1%}" if noise.paired.freedom else ""
    differ = f"runs of one configuration differ by {noise.unpaired.deviation:.1%}{within}"
    print(f"{len(blocks)} blocks of {runs} runs; {differ}")
    if options.picture:
        _draw(sweep, options.picture)
    draw = random.Random(0)
    seconds = 2 * _seconds_a_run(sweep)
    rows = [*_identical(same, blocks, draw, auto), *_slower(same[0], slowed, blocks, draw, auto, seconds)]
    print(*rows, sep="\n")
    return int(not all(row.is_met for row in rows))


def _identical(
    same: Sequence[Sample], blocks: Sequence[Hashable], draw: random.Random, repeat: Repeat
) -> Iterator[Row]:
    """Configurations that do not differ."""
    if len(same) < 2:
        return
    pairs = [(same[2 * number], same[2 * number + 1]) for number in range(len(same) // 2)]
    groups = [blocks[start : start + RUNS] for start in range(0, len(blocks) - RUNS + 1, RUNS)]
    fresh = [_differ(one, other, group) for one, other in pairs for group in groups]
    drawn = [draw.sample(same, 2) for _ in range(TRIES)]
    again = [_differ(one, other, draw.sample(blocks, RUNS)) for one, other in drawn]
    auto = [_auto(one, other, _shuffled(blocks, draw), repeat)[0] for one, other in drawn]
    for name, share in (
        (f"identical, {RUNS} fresh runs each", Share(sum(fresh), len(fresh), is_fresh=True)),
        (f"identical, {RUNS} runs each", Share(sum(again), TRIES)),
        ("identical, repeat=auto", Share(sum(auto), TRIES)),
    ):
        yield Row(name, share, f"at most {LEVEL:.0%}", share.point <= LEVEL)
    stated = Share(sum(_as_stated(one, other, blocks, draw) for one, other in drawn), TRIES)
    name = f"slower by what {RUNS} runs each state, {RUNS} others each"
    yield Row(name, stated, f"at least {POWER:.0%}", stated.point >= POWER)


def _as_stated(one: Sample, other: Sample, blocks: Sequence[Hashable], draw: random.Random) -> bool:
    """Whether a difference of the size that some runs say would be seen is seen by others."""
    drawn = draw.sample(blocks, 2 * RUNS)
    apart = _apart(one, other, drawn[:RUNS])
    assert apart
    share = significance.compare(apart).detectable
    return _differ({block: rate * (1 + share) for block, rate in one.items()}, other, drawn[RUNS:])


def _slower(
    base: Sample,
    slowed: dict[float, Sample],
    blocks: Sequence[Hashable],
    draw: random.Random,
    repeat: Repeat,
    seconds: float,
) -> Iterator[Row]:
    """Configurations that do differ; a block of two takes so many seconds."""
    rule = f"at least {POWER:.0%}"
    for slower, other in slowed.items():
        tries = [_auto(base, other, _shuffled(blocks, draw), repeat) for _ in range(TRIES)]
        share = Share(sum(seen for seen, _ in tries), TRIES)
        used = median(used for _, used in tries)
        took = f"{used:.0f} of at most {repeat.max} blocks, {used * seconds:.0f} s"
        name = f"slower by {slower:.0%}, repeat=auto ({took})"
        is_asked = slower > repeat.tied_within  # else it may be called tied
        yield Row(name, share, rule if is_asked else "", not is_asked or share.point >= POWER)


def _draw(sweep: Path, path: Path) -> None:
    """The throughput of all runs in their order, as shares of the median of the identical configurations."""
    from matplotlib.figure import Figure

    ordered = sorted(store.read_results(sweep), key=lambda run: run.started or "")
    slowness = [run.config["model"]["slower"] for run in ordered]
    kinds = [slower if slower in SLOWER else 0.0 for slower in slowness]
    rates = [*zip(kinds, (run.throughput for run in ordered), strict=True)]
    base = median(rate for kind, rate in rates if rate and not kind)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    styles = {
        0.0: (".", "0.6", "identical"),
        SLOWER[0]: ("^", "#0072B2", "2 % slower"),
        SLOWER[1]: ("s", "#D55E00", "5 % slower"),
    }
    for kind, (marker, color, label) in styles.items():
        shown = [(place, 100 * rate / base) for place, (found, rate) in enumerate(rates) if rate and found == kind]
        axes.plot(*zip(*shown, strict=True), marker, color=color, label=label, markersize=4)
    axes.set(xlabel="run", ylabel="% of the median throughput")
    axes.legend(loc="lower left", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def _differ(one: Sample, other: Sample, blocks: Sequence[Hashable]) -> bool:
    return bool(significance.differing([_apart(one, other, blocks)])[0])


def _auto(one: Sample, other: Sample, blocks: Sequence[Hashable], repeat: Repeat) -> tuple[bool, int]:
    """Whether ``repeat=auto`` tells two configurations apart, and how many blocks it takes."""
    looks = [look for look in significance.interim_looks(repeat.max) if look <= len(blocks)]
    for look in looks:
        found = [_apart(one, other, blocks[:look])]
        if look == looks[-1] or not any(unsettled(found, repeat)):
            return bool(significance.differing(found, significance.level_of_look(repeat.max))[0]), look
    raise AssertionError("there is a last look")


def _apart(one: Sample, other: Sample, blocks: Sequence[Hashable]) -> Difference | None:
    """How far two configurations lie apart by these blocks, without others and without a past."""
    samples = [{block: sample[block] for block in blocks} for sample in (one, other)]
    return Pool(samples).difference(*samples)


def _shuffled(blocks: Sequence[Hashable], draw: random.Random) -> list[Hashable]:
    return draw.sample(blocks, len(blocks))


def _whole_blocks(samples: Sequence[Sample]) -> Sequence[Hashable]:
    """Those in which each configuration has a run that is ok, in the order in which they ran."""
    common = set.intersection(*(set(one) for one in samples))
    numbered = [block for block in common if isinstance(block, tuple)]  # by series and number
    return sorted(numbered)


def _seconds_a_run(sweep: Path) -> float:
    """From the start of one to that of the next; 0 where records do not say."""
    began = sorted(run.started for run in store.read_results(sweep) if run.started)
    times = [datetime.fromisoformat(one).timestamp() for one in began]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else 0.0


def _by_slowness(sweep: Path) -> tuple[list[Sample], dict[float, Sample]]:
    """The runs of the identical configurations, and of the others by how much they are slowed."""
    found = alternatives.group(store.read_results(sweep))
    samples: dict[float, Sample] = {_model(one)["slower"]: one.sample for one in found if "slower" in _model(one)}
    same = [sample for slower, sample in samples.items() if slower < min(SLOWER)]
    return same, {slower: sample for slower, sample in sorted(samples.items()) if slower >= min(SLOWER)}


def _model(one: Alternative) -> Mapping[str, Any]:
    """The options of its model."""
    model = one.median_run.config.get("model")
    return model if isinstance(model, Mapping) else {}


def _run(options: argparse.Namespace) -> Path:
    slower = ",".join(str(one) for one in (*(number / 1e6 for number in range(options.identical)), *SLOWER))
    words = ["model=gpt_tiny", "model._target_=benchmarks.slowed.Slowed", f"+model.slower={slower}"]
    words += [f"repeat={options.blocks}", f"train.steps={options.steps}", "train.global_batch=4", "profile.steps=0"]
    return swept("compare-truth", words)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--identical", type=int, default=10, help="configurations that differ in name alone")
    parser.add_argument("--steps", type=int, default=20, help="of a run, as of repeat=auto")
    parser.add_argument("--max", type=int, default=AUTO.max, help="repeat.max")
    parser.add_argument("--sweep", type=Path, help="judge the runs of an earlier call")
    parser.add_argument("--picture", type=Path, help="draw the runs")
    options = parser.parse_args()
    if not options.sweep and options.blocks < options.max:
        parser.error(f"--blocks {options.blocks}: repeat=auto may take {options.max}; give at least so many")
    return options


if __name__ == "__main__":
    sys.exit(main())
