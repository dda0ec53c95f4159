"""Why one run is faster than another, in sentences made of the figures of their phases and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ptdbench.report import phases
from ptdbench.report.phases import Record, Step
from ptdbench.report.ranking import Place
from ptdbench.units import three_digits

#: Steps that differ by less, as a share of the longer one, take equally long.
_NOISE = 0.02

#: A phase that makes up less of the difference between two runs is not named.
_NAMED = 0.1

#: Phases that a sentence names at most.
_MOST_NAMED = 5

#: Ranks whose forward and backward differ by less from the mean are equally fast.
_EVEN = 0.05

#: Profiling only makes steps longer: where they took less than this share, the timed steps met other conditions.
_SHORTER = 0.95

#: What is sent may differ from the formula by this share of it, and by messages of single numbers, in bytes.
_AS_FORMULA, _SINGLE_NUMBERS = 0.01, 100

#: Waiting for a rank is named from this share of the step on.
_WAITED = 0.02


@dataclass(frozen=True)
class _Part:
    """A part of the difference between two steps: its seconds, what it is called, and figures of it in brackets."""

    seconds: float
    name: str
    figures: str = ""


def compare(record: Record, against: Record, called: str, reference: str) -> str:
    """A sentence on how much longer or shorter the step of one run is than that of another, and in which phases.

    The parts that it names add up to the difference, as they are printed. A difference within the noise is not
    explained.

    Args:
        record: The run that the sentence is about; like the other, it has phases.
        against: The other run.
        called: What the run is called.
        reference: What the other one is called.
    """
    run, other = phases.step(record), phases.step(against)
    difference = run.seconds - other.seconds
    took = " and ".join(f"{three_digits(1e3 * step.seconds)} ms" for step in (run, other))
    if _is_alike(record, against):
        return f"{called} and {reference} take equally long: {took} a step"
    if abs(difference) < (spread := _spread(record, against)):
        uncertain = f"their medians are uncertain by {three_digits(1e3 * spread)} ms"
        return f"{called} and {reference} cannot be told apart: {took} a step, and {uncertain}"
    return _explained(record, against, called, reference)


def _takes(record: Record) -> float:
    return phases.step(record).seconds


def _is_alike(record: Record, against: Record) -> bool:
    """Whether the steps of two runs take equally long."""
    one, other = _takes(record), _takes(against)
    return abs(one - other) < _NOISE * max(one, other)


def _explained(record: Record, against: Record, called: str, reference: str) -> str:
    """The difference between two runs and the parts of it."""
    run, other = phases.step(record), phases.step(against)
    difference = run.seconds - other.seconds
    digits = _digits(difference)
    more = f"{_amount(difference, digits)} {'longer' if difference > 0 else 'less'}"
    parts = _added_up(_parts(record, run, other, reference), difference, digits)
    return f"{called} takes {more} than {reference}: {parts}"


def shares(record: Record, called: str) -> str:
    """The shares of a step in a line: ``ddp: forward 31%, backward 52%, exposed all-reduce 9%, other 8%``.

    Args:
        record: A run with phases.
        called: What it is called.
    """
    step = phases.step(record)
    percents = {part: round(100 * seconds / step.seconds) for part, seconds in step.parts().items() if part != "other"}
    named = {phases.PHASES.get(part, f"exposed {spoken(part)}"): share for part, share in percents.items() if share > 0}
    rest = 100 - sum(named.values())
    said = [f"{part} {share}%" for part, share in named.items()]
    return f"{called}: {', '.join([*said, *([f'other {rest}%'] if rest > 0 else [])])}"


def remarks(record: Record, called: str) -> Iterator[str]:
    """What the ranks of a run say: the bubble beside its formula, which rank is slow, and whom the others wait for."""
    found, step = record["phases"], phases.step(record)
    yield from doubt(record, called)
    yield from _unlike_formula(found, called)
    formula = found.get("bubble_formula")
    if formula is not None:
        share = step.phases["bubble"] / step.seconds
        yield f"{called}: the bubble is {share:.0%} of the step; {formula:.0%} by the formula, for equally long stages"
    if ranks := "; ".join([*_uneven(found), *_waited_for(found)]):
        yield f"{called}: {ranks}"


def doubt(record: Record, called: str) -> Iterator[str]:
    """That the phases of a run with phases may not be those of its timed steps, where there is a reason to think so."""
    ratio = record["phases"].get("profiled_step_seconds", math.inf) / record["phases"]["step_seconds"]
    if ratio < _SHORTER:
        than = "than the timed ones, so its phases may not be those of the timed steps"
        yield f"{called}: its profiled steps were {1 - ratio:.0%} shorter {than}"


def in_order(named: Mapping[str, Place]) -> list[dict[str, Record]]:
    """Of those that did the same work together the first one, and what is known to be slower, by their typical runs.

    What has no phases is left out.

    Args:
        named: Alternatives of one model in the order of their table, by what they are called.
    """
    typical = {called: place.alternative.typical for called, place in named.items()}
    groups = phases.groups({called: run for called, run in typical.items() if not phases.missing(run)})
    found = []
    for group in groups:
        reference = next(iter(group))
        found.append({
            called: run for called, run in group.items()
            if called == reference or named[called].is_behind(named[reference])
        })  # fmt: skip
    return found


def against_first(groups: Sequence[Mapping[str, Record]]) -> list[str]:
    """Each run against the first one of its group, from :func:`in_order`; the shares of one without any other.

    One whose steps were as fast, or faster, in these runs is not explained by them.
    """
    lines = []
    for group in groups:
        (reference, first), *others = group.items()
        slower = [(called, run) for called, run in others if not _is_alike(run, first) and _takes(run) > _takes(first)]
        lines += [_explained(run, first, called, reference) for called, run in slower]
        if not slower:
            lines.append(shares(first, reference))
    return lines


def _unlike_formula(found: Mapping[str, Any], called: str) -> Iterator[str]:
    """The operations with which the ranks send more or less than the layout should."""
    for name, sent in (found.get("communication") or {}).items():
        formula = sent.get("formula_bytes")
        if formula is not None and abs(sent["bytes"] - formula) > max(_AS_FORMULA * formula, _SINGLE_NUMBERS):
            sizes = f"{bytes_text(sent['bytes'])} a step, and {bytes_text(formula)} by the formula of its layout"
            yield f"{called}: a rank's {spoken(name)} is {sizes}"


def _uneven(found: Mapping[str, Any]) -> Iterator[str]:
    """The slowest and the fastest rank, where one differs."""
    seconds = phases.compute_seconds(found)
    mean = fmean(seconds)
    relative = [one / mean - 1 if mean else 0.0 for one in seconds]
    slowest, fastest = (relative.index(choose(relative)) for choose in (max, min))
    words = [
        f"{abs(relative[rank]):.0%} {'longer' if relative[rank] > 0 else 'less'} on {_with_parts(found, rank)}"
        for rank in (slowest, fastest)
        if abs(relative[rank]) >= _EVEN
    ]
    if words:
        yield f"forward and backward take {' and '.join(words)} than on average"


def _with_parts(found: Mapping[str, Any], rank: int) -> str:
    """A rank's name with what its stages hold besides repeated layers: ``rank 3 (stage 3), which holds head,``."""
    stages, parts = (found.get("stages") or {rank: []})[rank], found.get("stage_parts") or {}
    held = [name for stage in stages if stage < len(parts) for name in parts[stage]]
    return phases.rank_name(found, rank) + (f", which holds {' and '.join(held)}," if held else "")


def _waited_for(found: Mapping[str, Any]) -> Iterator[str]:
    """The rank that the others wait for, if they do, and whether it is always the same."""
    waited = found.get("waited_for") or [0.0]
    longest = max(waited)
    if longest < _WAITED * found["step_seconds"]:
        return
    rank, most = waited.index(longest), [one for one in found.get("waited_for_most") or [] if one is not None]
    name, of_step = phases.rank_name(found, rank), f"{three_digits(1e3 * longest)} ms of a step"
    if not most or len(found["waited_for_most"]) < 2:
        yield f"the others wait {of_step} for {name}"
    elif 2 * most.count(rank) > len(most) or len(set(most)) < 2:
        steps = len(found["waited_for_most"])
        yield f"the others wait {of_step} for {name}, longest for it in {most.count(rank)} of {steps} steps"
    else:
        yield f"the others wait for different ranks in turn, longest for {name}: {of_step}"


def _spread(*records: Record) -> float:
    """Half the 95 % interval of the difference between the medians of two runs; 0 where neither has an interval."""
    statistics = [(record.get("metrics") or {}).get("step_seconds") or {} for record in records]
    intervals = [found["ci95"] for found in statistics if len(found.get("ci95") or []) == 2]
    return math.hypot(*((high - low) / 2 for low, high in intervals))


#: How a sentence names a phase in which a run spends more time or less; operations of communication have their names.
_IN = phases.PHASES | {
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer",
    "other": "unexplained",
}


def _parts(record: Record, run: Step, other: Step, reference: str) -> list[_Part]:
    """What the difference between two steps consists of."""
    ours, theirs = run.parts(), other.parts()
    return [
        _Part(
            ours.get(name, 0.0) - theirs.get(name, 0.0),
            _IN.get(name, f"{spoken(name)} that no compute covers"),
            _of_bubble(record, run) if name == "bubble" else _of_operation(name, run, other, reference),
        )
        for name in dict.fromkeys([*ours, *theirs])
    ]


def _of_bubble(record: Record, run: Step) -> str:
    """The bubble's share of the step, beside the one by the formula."""
    formula = record["phases"].get("bubble_formula")
    share = run.phases["bubble"] / run.seconds
    return "" if formula is None else f"{share:.0%} of the step; {formula:.0%} by the formula"


def _of_operation(name: str, run: Step, other: Step, reference: str) -> str:
    """What each of two runs sends with an operation."""
    ours, theirs = (_traffic(step.operations.get(name)) for step in (run, other))
    return "; ".join(filter(None, (ours, theirs and f"{reference}: {theirs}")))


def _added_up(parts: Sequence[_Part], difference: float, digits: int) -> str:
    """The largest parts, and the rest of the difference, so that the printed numbers add up."""
    ordered = sorted(parts, key=lambda part: -abs(part.seconds))
    named = [part for part in ordered if abs(part.seconds) >= _NAMED * abs(difference)][:_MOST_NAMED]
    said = [f"{_signed(part.seconds, digits)} {part.name}{part.figures and f' ({part.figures})'}" for part in named]
    rest = _rounded(difference, digits) - sum(_rounded(part.seconds, digits) for part in named)
    if _rounded(rest, digits):
        said.append(f"{_signed(rest, digits)} in other phases")
    return ", ".join(said)


def _digits(difference: float) -> int:
    """Decimals of milliseconds that show two digits of a difference, and all of one of more digits."""
    return max(0, 1 - math.floor(math.log10(abs(1e3 * difference))))


def _rounded(seconds: float, digits: int) -> float:
    return round(1e3 * seconds, digits) / 1e3


def _amount(seconds: float, digits: int) -> str:
    return f"{abs(1e3 * seconds):,.{digits}f} ms"


def _signed(seconds: float, digits: int) -> str:
    return f"{_amount(seconds, digits)} {'more' if seconds > 0 else 'less'}"


def spoken(operation: str) -> str:
    """``all_gather`` becomes ``all-gather``, and what belongs to no call that was seen ``unknown communication``."""
    return "unknown communication" if operation == "unknown" else operation.replace("_", "-")


def _traffic(found: Mapping[str, Any] | None) -> str:
    """What an operation sends in a step, at which rate, and how long the link takes by its fit, where that is known.

    ``49.0 MB at 1.60 GB/s``, ``49.0 MB at 1.60 GB/s in 30.6 ms; the link's fit allows 21.0 ms``.
    """
    if not found or not found["bytes"]:
        return ""
    sent, fit = bytes_text(found["bytes"]), found.get("fit_seconds")
    if not found["seconds"]:
        return sent
    rate = f"{sent} at {bytes_text(found['bytes'] / found['seconds'])}/s"
    if fit is None:
        return rate
    taken, allowed = (three_digits(1e3 * seconds) for seconds in (found["seconds"], fit))
    return f"{rate} in {taken} ms; the link's fit allows {allowed} ms"


def bytes_text(size: float) -> str:
    """``49e6`` bytes become ``49.0 MB``."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1.0, "B"))
    return f"{three_digits(size / unit)} {name}"


_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
