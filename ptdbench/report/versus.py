"""One set of runs against another, as before and after a change: what is slower, and what would have been seen."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ptdbench.measure import comparison
from ptdbench.measure.comparison import LEAST, LEVEL, POWER, Comparison
from ptdbench.records import alternatives
from ptdbench.records.alternatives import Alternative
from ptdbench.report.labels import names
from ptdbench.report.phases import other_work
from ptdbench.report.reason import reason, wrap
from ptdbench.report.text import as_text, empty_table, three_digits
from ptdbench.terminal import plural

Verdict = Literal["faster", "slower", "no difference seen", "not enough data", "fails", "runs again"]

#: What two environments are compared by.
_ENVIRONMENT = ("ptdbench", "python", "torch", "cuda", "driver", "nccl", "cpu", "host", "git_commit")


class Incomparable(Exception):
    """Two sets of runs that have nothing to compare; the message says why."""


@dataclass(frozen=True)
class Pair:
    """The same configuration before and after, or two that did the same work.

    Attributes:
        label: What it is called.
        before: Its runs before.
        after: Its runs after.
        known: The throughput after over that before; ``None`` where there are too few runs.
        verdict: What is seen of the difference, for all pairs together.
    """

    label: str
    before: Alternative
    after: Alternative
    known: Comparison | None
    verdict: Verdict


@dataclass(frozen=True)
class Versus:
    """Two sets of runs beside each other.

    Attributes:
        pairs: The configurations that both have.
        missing: What the one has and the other has not, in sentences.
    """

    pairs: list[Pair]
    missing: list[str]


def match(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Versus:
    """Bring together what did the same work, by configurations; one configuration on each side is a pair as well.

    Args:
        before: Records of runs that train.
        after: Others.

    Raises:
        Incomparable: They have no configuration in common, or did other work.
    """
    ignored = _new_options(before, after)
    one, other = (alternatives.by_identity(runs, ignored) for runs in (before, after))
    common = [key for key in one if key in other]
    if not common and len(one) == len(other) == 1:
        return Versus(_judged(_sole(*one.values(), *other.values())), [])
    if not common:
        words = ("before", "after")
        listed = [
            f"{word} {', '.join(_called([*side.values()]))}" for word, side in zip(words, (one, other), strict=True)
        ]
        raise Incomparable(f"no configuration is in both; {'; '.join(listed)}")
    called = _called([one[key] for key in common])
    pairs = [(label, one[key], other[key]) for label, key in zip(called, common, strict=True)]
    return Versus(_judged(pairs), _missing(one, other, common))


def _new_options(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Options that one version of this package has and the other one has not: they cannot tell configurations apart."""
    versions = [{(run.get("environment") or {}).get("ptdbench") for run in runs} for runs in (before, after)]
    if versions[0] == versions[1]:
        return frozenset()
    has = [{name for run in runs for name in alternatives.option_names(run)} for runs in (before, after)]
    return frozenset(has[0] ^ has[1])


def _sole(one: Alternative, other: Alternative) -> list[tuple[str, Alternative, Alternative]]:
    if difference := other_work(one.typical, other.typical):
        raise Incomparable(
            f"they did other work, {difference}; give runs of the same model, global batch and precision"
        )
    before, after = _called([one, other])
    return [(f"{before} → {after}", one, other)]


def _called(found: Sequence[Alternative]) -> list[str]:
    """Model and layout of each."""
    records = [one.typical for one in found]
    several = len({record.get("model") for record in records}) > 1
    return [
        f"{record['model']} {name}" if several else name for record, name in zip(records, names(records), strict=True)
    ]


def _missing(
    one: Mapping[Hashable, Alternative], other: Mapping[Hashable, Alternative], common: Sequence[Hashable]
) -> list[str]:
    """What is on one side alone."""
    left = {"before": [one[key] for key in one if key not in common]}
    left["after"] = [other[key] for key in other if key not in common]
    return [f"only {word}: {', '.join(_called(found))}" for word, found in left.items() if found]


def _judged(pairs: Sequence[tuple[str, Alternative, Alternative]]) -> list[Pair]:
    """The verdicts, whose level holds for all pairs together."""
    samples = [(after.sample, before.sample) for _, before, after in pairs]
    signs = comparison.differing(samples, LEVEL)
    found = []
    for (label, before, after), (now, then), sign in zip(pairs, samples, signs, strict=True):
        known = comparison.compare(now, then)
        found.append(Pair(label, before, after, known, _verdict(before, after, known, sign)))
    return found


def _verdict(before: Alternative, after: Alternative, known: Comparison | None, sign: int) -> Verdict:
    if before.sample and not after.sample:
        return "fails"
    if after.sample and not before.sample:
        return "runs again"
    if known is None:
        return "not enough data"
    return {1: "faster", -1: "slower", 0: "no difference seen"}[sign]  # type: ignore[return-value]


def status(found: Versus, threshold: float | None) -> int:
    """The exit status of a gate.

    Args:
        found: What is compared.
        threshold: A share: what is slower by less does not fail, and what is not seen to be slower fails to have
            enough data where so much would not have been seen; ``None``: whatever is seen fails.

    Returns:
        1: a configuration fails, or is slower. 3: there are not enough data to say that none is. 0: none is.
    """
    least = threshold or 0.0
    if any(pair.verdict == "fails" or (pair.verdict == "slower" and _loss(pair) >= least) for pair in found.pairs):
        return 1
    return 3 if any(_is_open(pair, threshold) for pair in found.pairs) else 0


def _loss(pair: Pair) -> float:
    """By which share a configuration became slower."""
    return 1 - pair.known.ratio if pair.known else 0.0


def _is_open(pair: Pair, threshold: float | None) -> bool:
    if pair.verdict != "no difference seen" or not pair.known:
        return pair.verdict == "not enough data"
    return threshold is not None and pair.known.detectable > threshold


def render(found: Versus, titles: tuple[str, str], width: int) -> str:
    """A table with a row for each pair, and what it does not say.

    Args:
        found: What is compared.
        titles: What the two sides are called.
        width: Columns.
    """
    table = empty_table(
        "configuration", "runs", *titles, "ratio (95%)", "verdict", words=["verdict"], folding="configuration"
    )
    for pair in found.pairs:
        runs = f"{len(pair.before.sample)}, {len(pair.after.sample)}"
        table.add_row(pair.label, runs, _rate(pair.before), _rate(pair.after), _ratio(pair), pair.verdict)
    remarks = [*_seen(found.pairs), *_failures(found.pairs), *found.missing, *_environments(found.pairs)]
    return "\n".join([as_text(table, width), *(wrap(line, width) for line in remarks)])


def _rate(one: Alternative) -> str:
    rate, margin = comparison.geometric_mean(one.sample), comparison.margin(one.sample)
    shown = "-" if rate is None else three_digits(rate)
    return shown if margin is None else f"{shown} ±{100 * margin:.1f}%"


def _ratio(pair: Pair) -> str:
    if pair.known:
        return f"{pair.known.ratio:.3f} ({pair.known.low:.3f}-{pair.known.high:.3f})"
    before, after = (comparison.geometric_mean(one.sample) for one in (pair.before, pair.after))
    return f"{after / before:.3f}" if before and after else "-"


def _seen(pairs: Sequence[Pair]) -> list[str]:
    """What was not seen, and what it would have taken."""
    lines = []
    for pair in pairs:
        if pair.verdict == "no difference seen" and pair.known:
            how = "paired by block" if pair.known.is_paired else "not paired: they were not run in turn"
            seen = f"a difference of {pair.known.detectable:.1%} would have been seen in {POWER:.0%} of cases"
            lines.append(f"{pair.label}: {seen} ({plural(pair.known.runs, 'run')} each, {how})")
        elif pair.verdict == "not enough data":
            lines.append(f"{pair.label}: it takes {LEAST} runs of each that are ok; add -m repeat=5")
    return lines


def _failures(pairs: Sequence[Pair]) -> list[str]:
    """Why runs are not ok."""
    return [
        f"{pair.label} {word}: {said}"
        for pair in pairs
        for word, side in (("before", pair.before), ("after", pair.after))
        for said in dict.fromkeys(reason(run) for run in side.runs if not alternatives.throughput(run))
    ]


def _environments(pairs: Sequence[Pair]) -> list[str]:
    """In what the two sides ran differently, besides their configurations."""
    sides = [[run for pair in pairs for run in side(pair).runs] for side in (_before, _after)]
    found = []
    for name in _ENVIRONMENT:
        values = [
            ", ".join(dict.fromkeys(str((run.get("environment") or {}).get(name)) for run in side)) for side in sides
        ]
        if values[0] != values[1]:
            found.append(f"{name} {values[0]} → {values[1]}")
    return [f"environment: {'; '.join(found)}"] if found else []


def _before(pair: Pair) -> Alternative:
    return pair.before


def _after(pair: Pair) -> Alternative:
    return pair.after
