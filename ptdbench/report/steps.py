"""Recorded steps of runs, phase by phase, and in a line each: what stands out, and why one is slower than another."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ptdbench.comparison.ranking import Standing
from ptdbench.grouping import grouped
from ptdbench.profiling.phases import PHASES
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Communication, Phases
from ptdbench.report import virtual
from ptdbench.report.text import difference
from ptdbench.units import bytes_text, three_digits

_Key = TypeVar("_Key")

#: The phases in which a rank does the work of its layers.
_COMPUTE = ("forward", "backward")


@dataclass(frozen=True)
class Step:
    """A timed step of a run, in seconds."""

    seconds: float  #: Its mean duration.
    phases: Mapping[str, float]  #: Its phases, averaged over ranks; ``other`` is the remainder.
    operations: Mapping[str, Communication]  #: The communication operations, by name.

    def parts(self) -> dict[str, float]:
        """Return the phases, with ``communication`` divided by operation; they add up to the step."""
        exposed = {name: parts.exposed_seconds for name, parts in self.operations.items()}
        parts: dict[str, float] = {}
        for phase, seconds in self.phases.items():
            parts |= exposed if phase == "communication" else {phase: seconds}
        return parts | {"other": self.seconds - sum(parts.values()) + parts["other"]}


def recorded_step(record: RunRecord) -> Step:
    """Return the mean timed step of a run with phases."""
    seconds, ranks = record.phases.step_seconds or 0.0, record.phases.ranks or {}
    means = {phase: fmean(ranks.get(phase) or [0.0]) for phase in PHASES}
    means["other"] = seconds - sum(mean for phase, mean in means.items() if phase != "other")
    return Step(seconds, means, record.phases.communication or {})


def compute_seconds(phases: Phases) -> list[float]:
    """Return the seconds of each rank in forward and backward."""
    ranks = phases.ranks or {}
    return [forward + backward for forward, backward in zip(*(ranks[phase] for phase in _COMPUTE), strict=True)]


def rank_name(phases: Phases, rank: int) -> str:
    """``rank 3``; in a pipeline ``rank 3 (stage 3)``, ``rank 0 (stages 0, 3)``."""
    stages = phases.stages[rank] if phases.stages else []
    named = f" (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})" if stages else ""
    return f"rank {rank}{named}"


def why_no_phases(record: RunRecord) -> str | None:
    """Return why a record has no phases to show, and what to do; ``None`` if it has phases."""
    if not record.model:
        return f"workload={record.workload} does not train, so it has no phases; give a run of workload=train"
    if record.phases.steps:
        wrong = _fault(record.phases)
        return f"its phases are damaged: {wrong}; run it again" if wrong else None
    return f"no phases: {record.phases.reason or _why_not_profiled(record)}"


def _why_not_profiled(record: RunRecord) -> str:
    if record.is_open:
        return "the run has not ended"
    if record.status != "ok":
        return f"the run did not finish ({record.status}), and they are taken after the last step"
    profile = record.option("profile", dict)
    if profile is None:
        version = record.environment.ptdbench
        return f"written by an earlier version{f' ({version})' if version else ''}; run it again"
    if steps := profile.get("steps"):
        return f"the {steps} profiled steps after the timed ones failed or were interrupted; run it again"
    return "profile.steps=0; run it again with profile.steps=5"


def _fault(phases: Phases) -> str | None:
    """Find errors that the schema cannot detect: missing fields, and lists of different lengths."""
    ranks = phases.ranks or {}
    if not phases.step_seconds:
        return "step_seconds must be above 0"
    if absent := [phase for phase in _COMPUTE if not ranks.get(phase)]:
        return f"ranks.{absent[0]} is missing"
    lengths = {len(numbers) for numbers in ranks.values()}
    lengths |= {len(of_ranks) for of_ranks in (phases.stages, phases.waited_for) if of_ranks}
    if len(lengths) > 1:
        return f"lists for {' and '.join(map(str, sorted(lengths)))} ranks"
    return None


def _work(record: RunRecord) -> dict[str, object]:
    """Return what must be equal for the steps of two runs to be the same work, by its display format."""
    return {
        "model={}": record.model,
        "{} parameters": record.parameters,
        "{} tokens a sample": record.tokens_per_sample,
        "train.global_batch={}": record.global_batch,
        "precision={}": record.precision,
        "kernels={}": record.kernels,
    }


def work_difference(record: RunRecord, other: RunRecord) -> str | None:
    """Return how the work of two runs differs, which makes their steps incomparable; ``None`` if it does not."""
    for (form, value), expected in zip(_work(record).items(), _work(other).values(), strict=True):
        if value != expected:
            return f"{form.format(value)} and {form.format(expected)}"
    return None


def by_work(records: Mapping[_Key, RunRecord]) -> list[dict[_Key, RunRecord]]:
    """Group the runs that did the same work, in order of first appearance."""
    alike = grouped((tuple(_work(record).values()), (key, record)) for key, record in records.items())
    return [dict(group) for group in alike.values()]


#: A difference below this fraction of the longer step is noise.
_NOISE = 0.02


def compare_steps(record: RunRecord, against: RunRecord, called: str, reference: str) -> str:
    """Return how much longer or shorter one run's step is than another's, and in which phases.

    A difference within the noise is not divided into phases.
    """
    ours, theirs = (recorded_step(run).seconds for run in (record, against))
    both = f"{called} {three_digits(1e3 * ours)} ms vs {reference} {three_digits(1e3 * theirs)} ms"
    if abs(ours - theirs) < _NOISE * max(ours, theirs):
        return f"{both}: within {_NOISE:.0%}"
    medians = (record.step_seconds.median or ours) - (against.step_seconds.median or theirs)
    if abs(medians) < (spread := _spread(record, against)):
        return f"{both}: medians within ±{three_digits(1e3 * spread)} ms (95%)"
    return _explained(record, against, called, reference)


def _spread(*records: RunRecord) -> float:
    """Return half the 95 % interval of the difference between the medians of runs; 0 if none has an interval."""
    intervals = [record.step_seconds.ci95 or [] for record in records]
    return math.hypot(*((ends[1] - ends[0]) / 2 for ends in intervals if len(ends) == 2))


def _explained(record: RunRecord, against: RunRecord, called: str, reference: str) -> str:
    """``fsdp +44 ms vs ddp: exposed all-gather +37 (64.0 MB, 1.60 GB/s), optimizer +9, rest -2``."""
    run, other = recorded_step(record), recorded_step(against)
    ours, theirs = run.parts(), other.parts()
    parts = {_part_name(part): 1e3 * (ours.get(part, 0.0) - theirs.get(part, 0.0)) for part in {**ours, **theirs}}
    notes = {"bubble": _bubble(record)}
    for name in {**run.operations, **other.operations}:
        sent, before = (_traffic(step.operations.get(name)) for step in (run, other))
        if sent or before:
            notes[_part_name(name)] = "; ".join(filter(None, [sent, before and f"{reference} {before}"]))
    return difference(called, reference, "ms", parts, notes, digits=2)


def shares_of_step(record: RunRecord, called: str) -> str:
    """Return the breakdown of a step: ``ddp: forward 31%, backward 52%, exposed all-reduce 9%, other 8%``."""
    step = recorded_step(record)
    percents = {part: round(100 * seconds / step.seconds) for part, seconds in step.parts().items() if part != "other"}
    named = {_part_name(part): share for part, share in percents.items() if share > 0}
    rest = 100 - sum(named.values())
    shown = [*named.items(), *([("other", rest)] if rest > 0 else [])]
    return f"{called}: {', '.join(f'{part} {share}%' for part, share in shown)}"


def _part_name(part: str) -> str:
    """Return the name of a phase, or of the exposed part of an operation."""
    return part if part in PHASES else f"exposed {operation_name(part)}"


def operation_name(operation: str) -> str:
    """``all_gather`` becomes ``all-gather``; waits without a known call become ``unknown communication``."""
    return "unknown communication" if operation == "unknown" else operation.replace("_", "-")


def _traffic(sent: Communication | None) -> str:
    """``49.0 MB, 1.60 GB/s``: the traffic of an operation in a step."""
    if not sent or not sent.bytes:
        return ""
    rate = f", {bytes_text(sent.bytes / sent.seconds)}/s" if sent.seconds else ""
    return f"{bytes_text(sent.bytes)}{rate}"


def behind_first(named: Mapping[str, Standing]) -> list[dict[str, RunRecord]]:
    """Group the typical runs of alternatives that did the same work: the first, and those known to be slower.

    Runs without phases are omitted. ``named`` has the alternatives of one model in the order of their table, by name.
    """
    typical = {called: place.alternative.median_run for called, place in named.items()}
    phased = {called: run for called, run in typical.items() if not why_no_phases(run)}
    return [
        {called: run for called, run in group.items() if called == first or named[called].is_behind(named[first])}
        for group in by_work(phased)
        for first in [next(iter(group))]
    ]


def against_first(groups: Sequence[Mapping[str, RunRecord]]) -> list[str]:
    """Compare each run with the first of its group, from :func:`behind_first`; give the breakdown of a run on its own.

    A run whose steps were not slower in these typical runs is omitted, as they cannot explain it.
    """
    lines = []
    for group in groups:
        (reference, first), *others = group.items()
        seconds = recorded_step(first).seconds
        slower = [(name, run) for name, run in others if (1 - _NOISE) * recorded_step(run).seconds >= seconds]
        lines += [_explained(run, first, name, reference) for name, run in slower] or [shares_of_step(first, reference)]
    return lines


#: Ranks are equally fast if their forward and backward differ less than this from the mean, relatively.
_EVEN = 0.05

#: Profiling only slows steps down: if profiled steps took less than this fraction, timed steps ran in other conditions.
_SHORTER = 0.95

#: A straggler is named if ranks wait for it for at least this fraction of the step.
_WAITED = 0.02


def step_remarks(record: RunRecord, called: str) -> Iterator[str]:
    """Yield what stands out in a run: the bubble, uneven ranks, a straggler."""
    phases = record.phases
    yield from doubt_about_phases(record, called)
    if lopsided := record.remarks.pipeline:
        yield f"{called}: {lopsided}"
    if (fullest := record.experts.fullest_rank or 1.0) > 1:
        waited = recorded_step(record).phases["experts"]
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


def doubt_about_phases(record: RunRecord, called: str) -> Iterator[str]:
    """Yield a warning that phases may not apply to the timed steps, if the profiled steps were shorter."""
    ratio = (record.phases.profiled_step_seconds or math.inf) / (record.phases.step_seconds or 1.0)
    if ratio < _SHORTER:
        yield f"{called}: profiled steps {1 - ratio:.0%} shorter than the timed ones, phases uncertain"


def _bubble(record: RunRecord) -> str:
    """``21% of the step, 20% by formula``; empty if no formula is known."""
    if (formula := record.phases.bubble_formula) is None:
        return ""
    step = recorded_step(record)
    return f"{step.phases['bubble'] / step.seconds:.0%} of the step, {formula:.0%} by formula"


def _uneven(phases: Phases) -> Iterator[str]:
    """``forward + backward +9% on rank 1, -9% on rank 0``: the slowest and the fastest rank, if they differ."""
    seconds = compute_seconds(phases)
    mean = fmean(seconds)
    relative = [of_rank / mean - 1 if mean else 0.0 for of_rank in seconds]
    ends = [relative.index(choose(relative)) for choose in (max, min)]
    if apart := [rank for rank in ends if abs(relative[rank]) >= _EVEN]:
        texts = [f"{relative[rank]:+.0%} on {rank_name(phases, rank)}" for rank in apart]
        yield f"forward + backward {', '.join(texts)}"


def _straggler(phases: Phases) -> Iterator[str]:
    """``rank 1 is the straggler in 4 of 5 steps (2.42 ms per step)``: the rank that others wait for, if any."""
    waited, most = phases.waited_for or [0.0], phases.waited_for_most or []
    longest = max(waited)
    if longest >= _WAITED * (phases.step_seconds or 0.0):
        rank = waited.index(longest)
        often = f" in {most.count(rank)} of {len(most)} steps" if len(most) > 1 else ""
        yield f"{rank_name(phases, rank)} is the straggler{often} ({three_digits(1e3 * longest)} ms per step)"
