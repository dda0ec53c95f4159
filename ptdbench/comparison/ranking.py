"""The alternatives that a sweep compares, fastest first, and the certainty of their order, in the words of all tables.

Plans are ordered by predicted steps. Such a step is made of products, memory-bound work, messages and so on. The error
of a part is common to all steps on a device, so it cancels as far as two steps have the same share of it; what is left
of each step's own is the residual.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from statistics import NormalDist

from ptdbench.comparison import significance
from ptdbench.comparison.significance import LEVEL, MIN_RUNS, POWER, Comparison, Difference, Pool, level_of_look
from ptdbench.grouping import grouped
from ptdbench.records import ledger, store
from ptdbench.records.record import work
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Degree, Predicted
from ptdbench.terminal import plural
from ptdbench.units import three_digits


@dataclass(frozen=True)
class Alternative:
    """Runs of the same configuration on the same number of ranks."""

    runs: list[RunRecord]  #: The records, in the order given; at least one.
    #: Tokens per second of the runs that are ok, by block of repeats; samples per second if samples are not tokens.
    sample: dict[Hashable, float]

    @cached_property
    def median_run(self) -> RunRecord:
        """The run with the median throughput, of two the slower one; the first run if none is ok."""
        ranked = sorted((run for run in self.runs if run.throughput), key=lambda run: run.throughput or 0.0)
        return ranked[(len(ranked) - 1) // 2] if ranked else self.runs[0]


def group_runs(records: Iterable[RunRecord]) -> list[Alternative]:
    """Group runs into alternatives, in the order of their first runs."""
    return list(by_identity(records).values())


def of_sweeps(runs: Iterable[RunRecord]) -> list[Alternative]:
    """Group runs into alternatives separately for each sweep, side of a comparison, and single run.

    The program may have changed between them. The runs must be training runs, with their current locations in
    ``directory``.
    """
    sweeps: dict[Path, list[RunRecord]] = {}
    is_sweep: dict[Path, bool] = {}
    for run in runs:
        directory, parent = Path(run.directory), sweep_of(run)
        if parent not in is_sweep:  # also true of records without files
            is_nested = parent != directory.parent
            is_sweep[parent] = store.is_sweep(parent) or is_nested or not (directory / store.RECORD).exists()
        sweeps.setdefault(parent if is_sweep[parent] else directory, []).append(run)
    return [alternative for sweep in sweeps.values() for alternative in group_runs(sweep)]


def by_identity(
    records: Iterable[RunRecord], ignored: Collection[str] = (), others: Iterable[RunRecord] = ()
) -> dict[Hashable, Alternative]:
    """Group runs into alternatives by their identity: the same requested work and shape, and the same ranks and nodes.

    ``ignored``: dotted names of options that make no difference, in addition to those that never do; ``others``: the
    runs to compare these with.
    """

    def identity(run: RunRecord) -> Hashable:
        """Return a key that is equal if and only if two runs requested the same work and shape (perhaps ``auto``)."""
        return run.workload, work(run.config, ignored)

    alternatives: dict[Hashable, Alternative] = {}
    runs = [(identity(run), run) for run in records]
    # A run that failed early has not recorded its ranks and nodes: take them from other runs with the same request.
    sources = [*((identity(run), run) for run in others), *reversed(runs)]
    sizes = {request: run.world_size for request, run in sources if run.world_size}
    nodes = {(request, run.world_size): len(run.nodes) for request, run in sources if run.nodes}
    for request, run in runs:
        size = run.world_size or sizes.get(request)
        on = len(run.nodes) or nodes.get((request, size))
        alternative = alternatives.setdefault((request, size, on), Alternative([], {}))
        alternative.runs.append(run)
        if rate := run.throughput:
            block = _block(run)
            alternative.sample[run.directory if block in alternative.sample else block] = rate  # parallel=ddp,ddp
    return alternatives


def comparable(alternatives: Iterable[Alternative]) -> list[list[Alternative]]:
    """Group alternatives whose throughputs are comparable, in the order of their first runs; all must train.

    They train a model of the same name and size on samples of the same size with the same global batch. Sizes missing
    from a run that failed early are taken from another run with the same options of model and data.
    """
    runs = [(alternative.median_run, alternative) for alternative in alternatives]
    complete = {_trained(run): run for run, _ in runs if run.parameters}

    def size(run: RunRecord) -> Hashable:
        sized = run if run.parameters else complete.get(_trained(run), run)
        of_sample = run.option("data.image_size", int), sized.tokens_per_sample
        return run.model, sized.parameters, of_sample, run.requested_batch

    return [*grouped((size(run), alternative) for run, alternative in runs).values()]


def _trained(run: RunRecord) -> str:
    """Return a key of the options of model and data."""
    return json.dumps([run.config.get("model"), run.config.get("data")], sort_keys=True, default=str)


def sweep_of(run: RunRecord) -> Path:
    """Return the folder of a run's sweep; in a comparison, whose blocks are separate sweeps, of its side."""
    folder = Path(run.directory).parent
    sweep = _around(folder) or folder
    return sweep.parent if run.option("repeat.series", str) else sweep


_around = cache(ledger.around)  # a sweep may have thousands of runs


def _block(run: RunRecord) -> Hashable:
    """Return the key that pairs runs: the series and the block; unique for a run without a block."""
    block = run.option("repeat.block", int)
    if block is None:
        return str(Path(run.directory))
    return run.option("repeat.series", str) or str(sweep_of(run)), block


#: Shares above this are not shown as figures.
_MOST = 1.0

_WIDE = f"±>{_MOST:.0%}"


def level_of(runs: Iterable[RunRecord]) -> float:
    """Return the significance level for runs: smaller if ``repeat=auto`` has looked at them several times."""
    examined = [run for run in runs if run.option("repeat.runs", str) == "auto"]
    most = [blocks for run in examined if (blocks := run.option("repeat.max", Degree))]
    return level_of_look(max(most)) if most else LEVEL


def margin_text(margin: float | None) -> str:
    """Return the text after a figure: `` ±1.8%``, or empty if unknown."""
    if margin is None:
        return ""
    return f" ±{margin:.1%}" if margin <= _MOST else f" {_WIDE}"


def interval_text(comparison: Comparison | None, decimals: int) -> str:
    """Return the text after a ratio: `` (0.63-0.67)``, or empty if unknown."""
    if comparison is None:
        return ""
    if comparison.high / comparison.ratio - 1 > _MOST:
        return f" ({_WIDE})"
    return f" ({comparison.low:.{decimals}f}-{comparison.high:.{decimals}f})"


def detectable_text(share: float) -> str:
    """Return ``differences of 1.031x or more are detected (90% power)``, with two digits of the excess over 1."""
    decimals = 1 - math.floor(math.log10(share)) if 0 < share < 0.1 else 2
    if share > _MOST:
        return f"not even {1 + _MOST:.0f}x is detected ({POWER:.0%} power)"
    return f"differences of {1 + share:.{decimals}f}x or more are detected ({POWER:.0%} power)"


def differences(pairs: Sequence[tuple[Alternative, Alternative]]) -> list[Difference | None]:
    """Return the differences of pairs of alternatives, given the noise of all alternatives of the same model.

    ``None`` for a pair in which one has fewer than :data:`ptdbench.comparison.significance.MIN_RUNS` runs.
    """
    models = grouped((pair[0].median_run.model, (id(side), side.sample)) for pair in pairs for side in pair)
    pools = {model: Pool([*dict(samples).values()]) for model, samples in models.items()}
    return [
        pools[left.median_run.model].difference(left.sample, right.sample)
        if min(len(left.sample), len(right.sample)) >= MIN_RUNS
        else None
        for left, right in pairs
    ]


@dataclass(frozen=True)
class Standing:
    """The standing of an alternative in a ranking."""

    alternative: Alternative  #: The alternative.
    rank: tuple[int, int] | None = None  #: The best and the worst rank that it may have; ``None`` if no run is ok.
    rate: float | None = None  #: Tokens or samples per second, geometric mean over runs.
    #: Upper half-width of the rate's confidence interval, as a share; ``None`` with fewer than
    #: :data:`ptdbench.comparison.significance.MIN_RUNS` runs.
    margin: float | None = None
    ratio: float | None = None  #: Its rate over the first place's; ``None`` if it has no rate.
    against_best: Comparison | None = None  #: The same ratio with its interval, if there are enough runs.
    number: int | None = None  #: Its number among those with a rank.
    faster: Collection[int] = ()  #: The numbers of alternatives that are significantly faster.

    def is_behind(self, other: Standing) -> bool:
        """Return whether it is significantly slower than the other, possible even if their ranks overlap."""
        return other.number in self.faster


def rank(alternatives: Sequence[Alternative]) -> list[Standing]:
    """Rank comparable alternatives, fastest first; those without a run that is ok come last."""
    level = level_of(run for alternative in alternatives for run in alternative.runs)
    ok = [alternative for alternative in alternatives if alternative.sample]
    samples = [alternative.sample for alternative in ok]
    means, pool = [significance.geometric_mean(sample) or 0.0 for sample in samples], Pool(samples)
    faster = significance.faster(pool, samples, level)
    ranks = significance.ranks(faster)
    order = list(_in_order(faster, means))
    places = []
    for number in order:
        difference = pool.difference(samples[number], samples[order[0]]) if number != order[0] else None
        comparison = significance.compare(difference, level, pairs=math.comb(len(ok), 2)) if difference else None
        places.append(Standing(
            alternative=ok[number],
            rank=ranks[number],
            rate=means[number],
            margin=significance.margin(pool, samples[number], level),
            ratio=comparison.ratio if comparison else means[number] / means[order[0]],  # the former by common blocks
            against_best=comparison,
            number=number,
            faster=faster[number],
        ))  # fmt: skip
    return [*places, *(Standing(failed) for failed in alternatives if not failed.sample)]


def of_models(alternatives: Iterable[Alternative]) -> list[list[Standing]]:
    """Rank each group of :func:`comparable` separately."""
    return [rank(group) for group in comparable(alternatives)]


def _in_order(faster: Sequence[set[int]], means: Sequence[float]) -> Iterator[int]:
    """Order by means, but none before a significantly faster one, whose mean may suffer from a busier machine."""
    waiting = sorted(range(len(means)), key=lambda number: -means[number])
    behind = [len(winners) for winners in faster]  # how many significantly faster ones are still waiting
    while waiting:
        number = min(waiting, key=behind.__getitem__)  # none, unless pairs of different blocks form a circle
        waiting.remove(number)
        for other in waiting:
            behind[other] -= number in faster[other]
        yield number


#: Standard deviation of the logarithm of a predicted step that no part explains: kernels and gaps of its own.
RESIDUAL = 0.012


def rank_predicted(plans: Sequence[RunRecord]) -> list[Standing]:
    """Rank plans by their predicted steps, fastest first; those without a time come last.

    Ranges of ranks hold simultaneously, intervals one by one. Only plans of the same global batch may be compared, so
    rates are.
    """
    timed = sorted((plan for plan in plans if plan.predicted.rate), key=lambda plan: -plan.predicted.rate)
    level = LEVEL / max(1, math.comb(len(timed), 2))
    wide, narrow = (NormalDist().inv_cdf(1 - chance / 2) for chance in (level, LEVEL))
    slower: list[set[int]] = [set() for _ in timed]
    for fast, slow in permutations(range(len(timed)), 2):
        first, second = timed[fast].predicted, timed[slow].predicted
        if math.log(first.rate / second.rate) > wide * prediction_error(first, second):
            slower[slow].add(fast)
    places = [
        Standing(
            alternative=Alternative([plan], {}),
            rank=ends if len(timed) > 1 else None,
            rate=plan.predicted.rate,
            ratio=plan.predicted.rate / timed[0].predicted.rate,
            against_best=_against(plan.predicted, timed[0].predicted, narrow) if number else None,
            number=number,
            faster=slower[number],
        )
        for number, (plan, ends) in enumerate(zip(timed, significance.ranks(slower), strict=True))
    ]
    return [*places, *(Standing(Alternative([plan], {})) for plan in plans if not plan.predicted.rate)]


def prediction_error(step: Predicted, other: Predicted) -> float:
    """Return the standard deviation of the logarithm of two predicted steps' ratio, both with times."""
    first, second = ({name: spent / (each.step_seconds or 1.0) for name, spent in (each.parts or {}).items()}
                     for each in (step, other))  # fmt: skip
    shares = {**(other.errors or {}), **(step.errors or {})}
    parts = (share * (first.get(name, 0.0) - second.get(name, 0.0)) for name, share in shares.items())
    return math.sqrt(sum(part**2 for part in parts) + 2 * RESIDUAL**2)


def _against(step: Predicted, best: Predicted, quantile: float) -> Comparison:
    margin, ratio = math.exp(quantile * prediction_error(step, best)), step.rate / best.rate
    return Comparison(ratio, ratio / margin, ratio * margin, runs=0, is_paired=False, detectable=margin - 1)


def remark(places: Sequence[Standing]) -> str | None:
    """Summarize the certainty of the order in one line; ``None`` for a single place."""
    ranked = [place for place in places if place.rank]
    if len(ranked) < 2:
        return None
    counts = [len(place.alternative.sample) for place in ranked]
    if not any(place.against_best or place.faster for place in ranked):  # the first has too few runs
        return f"{_resolution(ranked)}: not ranked; repeat=5 ranks them"
    remarks = [f"ranks: simultaneous {1 - LEVEL:.0%} confidence", _resolution(ranked)]
    if min(counts) == 1 < max(counts):
        remarks.append("single runs: no rank")
    return "; ".join(remarks)


def _runs(fewest: int, most: int) -> str:
    """Return ``one run``, ``5 runs`` or ``1 to 5 runs``."""
    if fewest < most:
        return f"{fewest} to {most} runs"
    return "one run" if most == 1 else plural(most, "run")


def answer(named: Sequence[tuple[str, Standing]], unit: str) -> str:
    """Return which of the named places is fastest and by how much, as far as it is known; at least one has a rank."""
    ranked = [(name, place) for name, place in named if place.rank]
    leader, best = ranked[0]
    if len(ranked) == 1:
        return f"{leader}: {three_digits(best.rate or 0.0)} {unit}/s{margin_text(best.margin)}, compared with no other"
    first = [name for name, place in ranked if not place.faster]
    rest = [(name, place) for name, place in ranked if place.faster]
    if not first or not rest:
        noun = "layout" if len({place.alternative.runs[0].parallel for _, place in ranked}) > 1 else "configuration"
        remedy = "" if any(place.against_best for _, place in ranked) else "; repeat=5 ranks them"
        resolution = _resolution([place for _, place in ranked])
        return f"No {noun} is shown to be faster than another: {resolution}{remedy}"
    second, behind = rest[0]
    if len(first) > 1:
        slower = f"{second} is slower" if len(rest) == 1 else f"the others are slower, {second} least"
        return f"{spoken(first)} cannot be told apart; {slower}: {_times(behind, leader)}"
    alike = [name for name, place in rest if not any(place.is_behind(other) for _, other in rest)]
    apart = f"; {spoken(alike)} cannot be told apart" if len(alike) > 1 else ""
    return f"{leader} is fastest: {_times(behind, second, is_inverse=True)}{apart}"


def _times(place: Standing, reference: str, is_inverse: bool = False) -> str:
    """``0.77x ddp (95%: 0.71 to 0.83)``; inverse: how many times as fast the first place is."""
    best = place.against_best
    ratio, *ends = [place.ratio or 1.0, *([best.low, best.high] if best else [])]
    if is_inverse:
        ratio, *ends = 1 / ratio, *(1 / end for end in reversed(ends))
    decimals = 3 if ends and ends[1] - ends[0] < 0.02 else 2  # with fewer, the ends might look the same
    interval = f" (95%: {' to '.join(f'{end:.{decimals}f}' for end in ends)})" if ends else ""
    return f"{ratio:.{decimals}f}x {reference}{interval}"


def _resolution(ranked: Sequence[Standing]) -> str:
    """Return which differences the runs detect, or how many runs each had if that is unknown."""
    counts = [len(place.alternative.sample) for place in ranked]
    each = f"{_runs(min(counts), max(counts))} each"
    largest = max((place.against_best.detectable for place in ranked if place.against_best), default=None)
    return each if largest is None else f"with {each}, {detectable_text(largest)}"


def spoken(names: Sequence[str]) -> str:
    """``ddp, fsdp and tp``; of more than four names the first three, and how many others there are."""
    shown = [*names] if len(names) <= 4 else [*names[:3], plural(len(names) - 3, "other")]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
