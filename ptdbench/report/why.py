"""Differences between runs: why one is slower than another, phase by phase, in one line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from ptdbench.comparison import ranking
from ptdbench.comparison.ranking import Standing
from ptdbench.profiling.phases import PHASES
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Communication, Phases
from ptdbench.report import recorded_phases, virtual
from ptdbench.report.text import difference
from ptdbench.units import bytes_text, three_digits

#: A difference below this fraction of the longer step is noise.
_NOISE = 0.02

#: Ranks are equally fast if their forward and backward differ less than this from the mean, relatively.
_EVEN = 0.05

#: Profiling only slows steps down: if profiled steps took less than this fraction, timed steps ran in other conditions.
_SHORTER = 0.95


#: A straggler is named if ranks wait for it for at least this fraction of the step.
_WAITED = 0.02


def compare(record: RunRecord, against: RunRecord, called: str, reference: str) -> str:
    """Return how much longer or shorter one run's step is than another's, and in which phases.

    A difference within the noise is not divided into phases.
    """
    ours, theirs = _takes(record), _takes(against)
    both = f"{called} {three_digits(1e3 * ours)} ms vs {reference} {three_digits(1e3 * theirs)} ms"
    if abs(ours - theirs) < _NOISE * max(ours, theirs):
        return f"{both}: within {_NOISE:.0%}"
    if abs(_median(record) - _median(against)) < (spread := _spread(record, against)):
        return f"{both}: medians within ±{three_digits(1e3 * spread)} ms (95%)"
    return _explained(record, against, called, reference)


def _takes(record: RunRecord) -> float:
    return recorded_phases.step(record).seconds


def _explained(record: RunRecord, against: RunRecord, called: str, reference: str) -> str:
    """``fsdp +44 ms vs ddp: exposed all-gather +37 (64.0 MB, 1.60 GB/s), optimizer +9, rest -2``."""
    run, other = recorded_phases.step(record), recorded_phases.step(against)
    parts = {_named(part): 1e3 * seconds for part, seconds in parts_of_difference(record, against).items()}
    notes = {"bubble": _bubble(record)}
    for name in {**run.operations, **other.operations}:
        sent, before = (_traffic(step.operations.get(name)) for step in (run, other))
        if sent or before:
            notes[_named(name)] = "; ".join(filter(None, [sent, before and f"{reference} {before}"]))
    return difference(called, reference, "ms", parts, notes, digits=2)


def parts_of_difference(record: RunRecord, against: RunRecord) -> dict[str, float]:
    """Return the seconds by which the parts of one run's step are longer than another's.

    Parts are phases, with exposed communication divided by operation; they add up to the difference of the steps.
    """
    ours, theirs = recorded_phases.step(record).parts(), recorded_phases.step(against).parts()
    return {part: ours.get(part, 0.0) - theirs.get(part, 0.0) for part in dict.fromkeys([*ours, *theirs])}


def shares(record: RunRecord, called: str) -> str:
    """Return the breakdown of a step: ``ddp: forward 31%, backward 52%, exposed all-reduce 9%, other 8%``."""
    step = recorded_phases.step(record)
    percents = {part: round(100 * seconds / step.seconds) for part, seconds in step.parts().items() if part != "other"}
    named = {_named(part): share for part, share in percents.items() if share > 0}
    rest = 100 - sum(named.values())
    shown = [*named.items(), *([("other", rest)] if rest > 0 else [])]
    return f"{called}: {', '.join(f'{part} {share}%' for part, share in shown)}"


def remarks(record: RunRecord, called: str) -> Iterator[str]:
    """Yield what stands out in a run: the bubble, uneven ranks, a straggler."""
    phases = record.phases
    yield from doubt(record, called)
    if lopsided := record.remarks.pipeline:
        yield f"{called}: {lopsided}"
    if (fullest := record.experts.fullest_rank or 1.0) > 1:
        waited = recorded_phases.step(record).phases["experts"]
        share = f"{waited / (phases.step_seconds or math.inf):.0%} of the step"
        yield (
            f"{called}: the fullest rank computed {fullest:.2f} times the mean tokens of experts, others waited "
            f"{three_digits(1e3 * waited)} ms, {share}"
        )
    if bubble := _bubble(record):
        yield f"{called}: bubble {bubble}"
    if predicted := virtual.as_predicted(record):
        yield f"{called}: {predicted}"
    if ranks := "; ".join([*_uneven(phases), *_straggler(phases)]):
        yield f"{called}: {ranks}"


def doubt(record: RunRecord, called: str) -> Iterator[str]:
    """Yield a warning that phases may not apply to the timed steps, if the profiled steps were shorter."""
    ratio = (record.phases.profiled_step_seconds or math.inf) / (record.phases.step_seconds or 1.0)
    if ratio < _SHORTER:
        yield f"{called}: profiled steps {1 - ratio:.0%} shorter than the timed ones, phases uncertain"


def in_order(named: Mapping[str, Standing]) -> list[dict[str, RunRecord]]:
    """Group the typical runs of alternatives that did the same work: the first, and those known to be slower.

    Runs without phases are omitted. ``named`` has the alternatives of one model in the order of their table, by name.
    """
    typical = {called: place.alternative.median_run for called, place in named.items()}
    phased = {called: run for called, run in typical.items() if not recorded_phases.missing(run)}
    return [
        {called: run for called, run in group.items() if called == first or named[called].is_behind(named[first])}
        for group in recorded_phases.groups(phased)
        for first in [next(iter(group))]
    ]


def against_first(groups: Sequence[Mapping[str, RunRecord]]) -> list[str]:
    """Compare each run with the first of its group, from :func:`in_order`; give the breakdown of a run without others.

    A run whose steps were not slower in these typical runs is omitted, as they cannot explain it.
    """
    lines = []
    for group in groups:
        (reference, first), *others = group.items()
        slower = [(called, run) for called, run in others if (1 - _NOISE) * _takes(run) >= _takes(first)]
        lines += [_explained(run, first, called, reference) for called, run in slower] or [shares(first, reference)]
    return lines


def _bubble(record: RunRecord) -> str:
    """``21% of the step, 20% by formula``; empty if no formula is known."""
    if (formula := record.phases.bubble_formula) is None:
        return ""
    step = recorded_phases.step(record)
    return f"{step.phases['bubble'] / step.seconds:.0%} of the step, {formula:.0%} by formula"


def _uneven(phases: Phases) -> Iterator[str]:
    """``forward + backward +9% on rank 1, -9% on rank 0``: the slowest and the fastest rank, if they differ."""
    seconds = recorded_phases.compute_seconds(phases)
    mean = fmean(seconds)
    relative = [of_rank / mean - 1 if mean else 0.0 for of_rank in seconds]
    ends = [relative.index(choose(relative)) for choose in (max, min)]
    if apart := [rank for rank in ends if abs(relative[rank]) >= _EVEN]:
        texts = [f"{relative[rank]:+.0%} on {_with_parts(phases, rank)}" for rank in apart]
        yield f"forward + backward {', '.join(texts)}"


def _with_parts(phases: Phases, rank: int) -> str:
    """Return a rank's name and the parts of its stages besides repeated layers: ``rank 3 (stage 3) with head``."""
    stages, parts = phases.stages[rank] if phases.stages else [], phases.stage_parts or []
    held = [name for stage in stages if stage < len(parts) for name in parts[stage]]
    return recorded_phases.rank_name(phases, rank) + (f" with {ranking.spoken(held)}" if held else "")


def _straggler(phases: Phases) -> Iterator[str]:
    """``rank 1 is the straggler in 4 of 5 steps (2.42 ms per step)``: the rank that others wait for, if any."""
    waited, most = phases.waited_for or [0.0], phases.waited_for_most or []
    longest = max(waited)
    if longest >= _WAITED * (phases.step_seconds or 0.0):
        rank = waited.index(longest)
        often = f" in {most.count(rank)} of {len(most)} steps" if len(most) > 1 else ""
        name = recorded_phases.rank_name(phases, rank)
        yield f"{name} is the straggler{often} ({three_digits(1e3 * longest)} ms per step)"


def _median(record: RunRecord) -> float:
    """Return the seconds of the median step, or of the mean step if the median is not recorded."""
    return record.step_seconds.median or _takes(record)


def _spread(*records: RunRecord) -> float:
    """Return half the 95 % interval of the difference between the medians of runs; 0 if none has an interval."""
    intervals = [record.step_seconds.ci95 or [] for record in records]
    return math.hypot(*((ends[1] - ends[0]) / 2 for ends in intervals if len(ends) == 2))


def _named(part: str) -> str:
    """Return the name of a phase, or of the exposed part of an operation."""
    return part if part in PHASES else f"exposed {spoken(part)}"


def spoken(operation: str) -> str:
    """``all_gather`` becomes ``all-gather``; waits without a known call become ``unknown communication``."""
    return "unknown communication" if operation == "unknown" else operation.replace("_", "-")


def _traffic(sent: Communication | None) -> str:
    """``49.0 MB, 1.60 GB/s``: the traffic of an operation in a step."""
    if not sent or not sent.bytes:
        return ""
    rate = f", {bytes_text(sent.bytes / sent.seconds)}/s" if sent.seconds else ""
    return f"{bytes_text(sent.bytes)}{rate}"
