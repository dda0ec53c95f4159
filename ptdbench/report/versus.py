"""Compares two sets of runs, such as before and after a change: what is slower, and what could have been detected."""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Literal

from msgspec.structs import asdict

from ptdbench.comparison import significance
from ptdbench.comparison.ranking import (
    Alternative,
    by_identity,
    detectable_text,
    differences,
    interval_text,
    level_of,
    margin_text,
    of_models,
    spoken,
)
from ptdbench.comparison.significance import MIN_RUNS, Comparison
from ptdbench.grouping import grouped
from ptdbench.records.effects import affects, leaves
from ptdbench.records.run_record import RunRecord
from ptdbench.report import remarks
from ptdbench.report.columns import unit
from ptdbench.report.labels import names
from ptdbench.report.remarks import reason
from ptdbench.report.steps import work_difference
from ptdbench.report.text import MISSING, drawn, wrap
from ptdbench.terminal import plural
from ptdbench.units import three_digits

Verdict = Literal["faster", "slower", "no difference seen", "not enough data", "fails", "fails at times", "runs again"]

#: The verdict by the sign of a difference.
_SEEN: dict[int, Verdict] = {1: "faster", -1: "slower", 0: "no difference seen"}

#: Verdicts that no throughput makes up for.
_FAILING = ("fails", "fails at times")

#: What to do if there is nothing to compare.
_REMEDY = "give runs of the same model, global batch and precision, with the same options"


class Incomparable(Exception):
    """Two sets of runs that have nothing to compare; the message says why."""


@dataclass(frozen=True)
class Pair:
    """The same configuration before and after, or two that did the same work."""

    label: str  #: Its name.
    before: Alternative  #: Its runs before.
    after: Alternative  #: Its runs after.
    difference: Comparison | None  #: The throughput after relative to before; ``None`` if there are too few runs.
    verdict: Verdict  #: The verdict on the difference, at a level for all pairs together.
    losses: str | None  #: How far apart the losses of the same configuration are, if rounding does not explain it.

    @property
    def sides(self) -> tuple[tuple[str, Alternative], tuple[str, Alternative]]:
        """Both sides, with their names in sentences."""
        return ("before", self.before), ("after", self.after)

    @property
    def unit(self) -> str:
        """The unit of its throughput."""
        return unit(run for _, side in self.sides for run in side.runs)


@dataclass(frozen=True)
class Versus:
    """The comparison of two sets of runs."""

    pairs: list[Pair]  #: The configurations in both.
    remarks: list[str]  #: Sentences on what is not compared.
    sides: tuple[list[Alternative], list[Alternative]]  #: All configurations of each side.


def match(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> Versus:
    """Pair runs of the same configuration; a single configuration on each side that did the same work is a pair too.

    Raises:
        Incomparable: The sets have no configuration in common, or did different work.
    """
    ignored = _new_options(before, after)
    ours = by_identity(before, ignored, after)
    other = by_identity(after, ignored, before)
    common = [key for key in ours if key in other]
    by_key, is_same = {**other, **ours}, bool(common)
    called = dict(zip(by_key, names([alternative.median_run for alternative in by_key.values()]), strict=True))
    if common:
        pairs = [(called[key], ours[key], other[key]) for key in common]
    elif difference := _other_work([*ours.values()], [*other.values()]):
        raise Incomparable(f"they did other work, {difference}; {_REMEDY}")
    elif len(ours) == len(other) == 1:
        (first, was), (last, now) = *ours.items(), *other.items()
        pairs, common = [(f"{called[first]} → {called[last]}", was, now)], [first, last]
    else:
        raise Incomparable(f"no configuration is in both: {'; '.join(_alone(called, ours, other, []))}; {_REMEDY}")
    lines = [f"only {configurations}" for configurations in _alone(called, ours, other, common)]
    if outermost := sorted(name for name in ignored if name.rpartition(".")[0] not in ignored):  # or of a whole group
        lines.append(f"options of one version of ptdbench alone, not compared: {spoken(outermost)}")
    return Versus(_judged(pairs, is_same), lines, ([*ours.values()], [*other.values()]))


def _new_options(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> frozenset[str]:
    """Return options that only one version of this package has.

    They do not distinguish configurations, unless the version that has them was run with several values.
    """
    sides = (before, after)
    was, now = ({(run.environment.ptdbench, run.environment.git_commit) for run in side} for side in sides)
    if was == now:
        return frozenset()
    first, last = (grouped((name, repr(value)) for run in side for name, value in leaves(run.config)) for side in sides)
    alone = {name for name in first.keys() ^ last.keys() if not affects(name, "nothing")}
    return frozenset(name for name in alone if len({*(first | last)[name]}) == 1)


def _other_work(before: Sequence[Alternative], after: Sequence[Alternative]) -> str | None:
    """Return how the work of the sides differs; ``None`` if any two did the same, or all runs of a side failed."""
    ok = [[alternative.median_run for alternative in side if alternative.sample] for side in (before, after)]
    differences = [work_difference(*runs) for runs in product(*ok)]
    return differences[0] if differences and all(differences) else None


def _alone(
    called: Mapping[Hashable, str],
    before: Collection[Hashable],
    after: Collection[Hashable],
    common: Collection[Hashable],
) -> list[str]:
    """List the configurations that only one side has: ``before: ddp, fsdp``."""
    sides = {"before": before, "after": after}
    alone = {word: [called[key] for key in keys if key not in common] for word, keys in sides.items()}
    return [f"{word}: {', '.join(names)}" for word, names in alone.items() if names]


def _judged(pairs: Sequence[tuple[str, Alternative, Alternative]], is_same: bool) -> list[Pair]:
    """Judge pairs, at a level for all of them together, and for all looks at them if both sides took turns.

    For the same configuration (``is_same``) losses should be equal, too.
    """
    compared = differences([(after, before) for _, before, after in pairs])
    # Only runs of sides that took turns: a separate sweep looked only at its own runs.
    runs = [run for _, *sides in pairs for side in sides for run in side.runs]
    level = level_of(run for run in runs if run.option("repeat.series", str))
    signs = significance.differing(compared, level)
    judged = []
    for (label, before, after), apart, sign in zip(pairs, compared, signs, strict=True):
        difference = significance.compare(apart, level, pairs=len(pairs)) if apart else None
        verdict = _failing(before, after) or (_SEEN[sign] if difference else "not enough data")
        losses = remarks.losses_apart(before.runs, after.runs) if is_same else None
        judged.append(Pair(label, before, after, difference, verdict, losses))
    return judged


def _failing(before: Alternative, after: Alternative) -> Verdict | None:
    """Judge failures: one is enough if there was none before."""
    was, now = (len(_failed(side)) for side in (before, after))
    if before.sample and now and not after.sample:
        return "fails"
    if after.sample and was and not before.sample:
        return "runs again"
    if before.sample and now and not was:
        return "fails at times"
    return None


def _failed(side: Alternative) -> list[RunRecord]:
    return [run for run in side.runs if not run.throughput and not _interruption(run)]


def _interrupted(side: Alternative) -> list[str]:
    return [word for run in side.runs if (word := _interruption(run))]


def _interruption(run: RunRecord) -> str | None:
    """Return why a run was interrupted or is unfinished, which says nothing about the program."""
    if run.is_open:
        return "unfinished"
    if run.error.type == "CANCELLED":  # by scancel
        return "cancelled"
    return "preempted" if run.status == "preempted" else None


def status(comparison: Versus, threshold: float | None) -> int:
    """Return the exit status of a gate.

    With a threshold, a fraction, a configuration fails if it is slower by at least that much, or if its losses differ;
    it passes only if the interval of its ratio excludes such a slowdown. Without a threshold, a configuration fails if
    it is seen to be slower.

    Returns:
        1: a configuration fails or is slower. 3: there are not enough data to exclude that. 0: none is.
    """
    outcomes = {_outcome(pair, threshold) for pair in comparison.pairs}
    return next((outcome for outcome in (1, 3) if outcome in outcomes), 0)


def gate(comparison: Versus, threshold: float) -> list[str]:
    """Return why a gate with a threshold does not pass, unless the verdicts say so."""
    other = [pair.label for pair in comparison.pairs if pair.losses]
    unsure = [pair.label for pair in comparison.pairs if pair.difference and _outcome(pair, threshold) == 3]
    lines = {
        "fails, because it does not train the same on both sides": other,
        f"its runs do not rule out that it is slower by {100 * threshold:.6g}%; try more repeats": unsure,
    }
    return [f"{', '.join(labels)}: {line}" for line, labels in lines.items() if labels]


def _outcome(pair: Pair, threshold: float | None) -> int:
    is_slower = pair.verdict == "slower" and pair.difference and 1 - pair.difference.ratio >= (threshold or 0.0)
    if pair.verdict in _FAILING or is_slower or (threshold is not None and pair.losses):
        return 1
    is_open = threshold is not None and pair.difference and pair.difference.low <= 1 - threshold
    return 3 if is_open or pair.verdict == "not enough data" else 0


def render(comparison: Versus, titles: tuple[str, str], width: int) -> str:
    """Return a table with a row for each pair, and remarks."""
    common_unit = _unit(comparison)
    rates = [f"{title} {common_unit}/s" if common_unit else title for title in map(_short, titles)]
    headings = ["configuration", "runs", *rates, "ratio (95%)", "verdict"]
    rankings = chain.from_iterable(map(of_models, comparison.sides))
    margins = {id(place.alternative): margin_text(place.margin) for places in rankings for place in places}
    rows = []
    for pair in comparison.pairs:
        runs = f"{len(pair.before.sample)}, {len(pair.after.sample)}"
        sides = [_rate(side, margins[id(side)] + ("" if common_unit else f" {pair.unit}/s")) for _, side in pair.sides]
        rows.append([pair.label, runs, *sides, _ratio(pair), pair.verdict])
    table = drawn(headings, rows, width, ["configuration", "verdict"])
    other = [f"{pair.label}: {pair.losses}" for pair in comparison.pairs if pair.losses]
    lines = [*_seen(comparison.pairs), *other, *_remarks(comparison)]
    return "\n".join([table, *(wrap(line, width) for line in lines)])


def as_json(comparison: Versus, threshold: float | None) -> dict[str, object]:
    """Return the comparison as printed by ``compare --json``; docs/results.md describes each key."""
    return {
        "status": status(comparison, threshold),
        "unit": _unit(comparison),
        "pairs": [_as_json(pair) for pair in comparison.pairs],
        "remarks": _remarks(comparison),
    }


def _remarks(comparison: Versus) -> list[str]:
    """Return remarks on failures, omitted runs, other load, and differences between the sides' environments."""
    sides = [(f"{pair.label} {word}", side) for pair in comparison.pairs for word, side in pair.sides]
    lines = []
    for name, side in sides:  # each reason once
        for cause, count in Counter(map(reason, _failed(side))).items():
            lines.append(f"{name}: {count} of {plural(len(side.runs), 'run')}: {cause}")
    for name, side in sides:
        if words := _interrupted(side):
            counts = ", ".join(f"{count} {word}" for word, count in Counter(words).items())
            lines.append(f"{name}: {len(words)} of {plural(len(side.runs), 'run')} left out: {counts}")
    load = remarks.load_remarks([(name, side.runs) for name, side in sides])
    return [*lines, *comparison.remarks, *load, *_environments(comparison.pairs)]


def _as_json(pair: Pair) -> dict[str, object]:
    difference = pair.difference
    sides = {
        word: {
            "per_second": significance.geometric_mean(side.sample),
            "runs": len(side.sample),
            "failed": len(_failed(side)),
            "interrupted": len(_interrupted(side)),
            "directories": [run.directory for run in side.runs],
        }
        for word, side in pair.sides
    }
    return {
        "configuration": pair.label,
        "verdict": pair.verdict,
        "unit": pair.unit,
        "ratio": difference and difference.ratio,
        "interval": difference and [difference.low, difference.high],
        "detectable": difference and difference.detectable,
        "paired": difference and difference.is_paired,
        "losses": pair.losses,
        **sides,
    }


def _unit(comparison: Versus) -> str | None:
    """Return the unit of all throughputs; ``None`` if pairs have different ones."""
    measured = [pair for pair in comparison.pairs if any(side.sample for _, side in pair.sides)]
    units = {pair.unit for pair in measured or comparison.pairs}
    return units.pop() if len(units) == 1 else None


def _short(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{40}\b", lambda match: match[0][:10], text)


def _rate(side: Alternative, more: str) -> str:
    rate = significance.geometric_mean(side.sample)
    return MISSING if rate is None else f"{three_digits(rate)}{more}"


def _ratio(pair: Pair) -> str:
    if pair.difference:
        return f"{pair.difference.ratio:.3f}{interval_text(pair.difference, 3)}"
    before, after = (significance.geometric_mean(side.sample) for _, side in pair.sides)
    return f"{after / before:.3f}" if before and after else MISSING


def _seen(pairs: Sequence[Pair]) -> list[str]:
    """Return the detectable difference for pairs without one, and the runs needed for pairs with too few."""
    lines = []
    for pair in pairs:
        if pair.verdict == "no difference seen" and pair.difference:
            method = "paired by block" if pair.difference.is_paired else "not paired: they were not run in turn"
            runs = f"{plural(pair.difference.runs, 'run')} each"
            lines.append(f"{pair.label}: {detectable_text(pair.difference.detectable)}, {runs}, {method}")
        elif pair.verdict == "not enough data":
            fails = all(_failed(side) and not side.sample for _, side in pair.sides)
            more = f"it takes {MIN_RUNS} runs of each that are ok; try repeat=5"
            lines.append(f"{pair.label}: {'no run is ok on either side' if fails else more}")
    return lines


def _environments(pairs: Sequence[Pair]) -> list[str]:
    """Return how the environments of the two sides differ; other GPUs have a line of their own."""
    sides = []
    for place in (0, 1):
        runs = [run for pair in pairs for run in pair.sides[place][1].runs]
        # A run that failed early may have been on a login node: it counts only without others.
        sides.append([_environment(run) for run in [run for run in runs if run.throughput] or runs])
    apart = {}
    for name in dict.fromkeys(chain.from_iterable(chain.from_iterable(sides))):
        values = [", ".join(sorted({fields.get(name, "none") for fields in side})) for side in sides]
        if values[0] != values[1]:
            apart[name] = " → ".join(values)
    gpus = apart.pop("GPUs", None)
    others = "; ".join(f"{name} {_short(values)}" for name, values in apart.items())
    return [*([f"not the same GPUs: {gpus}"] if gpus else []), *([f"environment: {others}"] if others else [])]


def _environment(run: RunRecord) -> dict[str, str]:
    """Return what is known of a run's environment by name: each variable by its own, each model of GPU once."""
    fields = asdict(run.environment)
    fields |= fields.pop("settings") or {}
    fields["GPUs"] = ", ".join(dict.fromkeys(map(str, fields.pop("devices") or []))) or None
    return {name: str(value) for name, value in fields.items() if value is not None}
