"""The phases of a step, read from a record for all displays, and why a record has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ptdbench.grouping import grouped
from ptdbench.profiling.phases import PHASES
from ptdbench.records.record import is_open, option
from ptdbench.records.schema import Communication, Environment, Phases, Written, part

_Key = TypeVar("_Key")
_Run = TypeVar("_Run", bound=Written)

#: The phases in which a rank does the work of its layers.
COMPUTE = ("forward", "backward")

#: With more ranks, only their mean, the slowest and the fastest one are shown.
MOST_RANKS = 16


@dataclass(frozen=True)
class Step:
    """A timed step of a run, in seconds."""

    seconds: float  #: Its mean duration.
    phases: Mapping[str, float]  #: Its phases, averaged over ranks; ``other`` is the remainder.
    operations: Mapping[str, Communication]  #: The communication operations, by name.

    def parts(self) -> dict[str, float]:
        """Return the phases, with ``communication`` divided by operation; they add up to the step."""
        exposed = {name: found.exposed_seconds for name, found in self.operations.items()}
        found: dict[str, float] = {}
        for phase, seconds in self.phases.items():
            found |= exposed if phase == "communication" else {phase: seconds}
        return found | {"other": self.seconds - sum(found.values()) + found["other"]}


def step(record: Written) -> Step:
    """Return the mean timed step of a run with phases."""
    found = part(record, Phases)
    seconds, ranks = found.step_seconds or 0.0, found.ranks or {}
    means = {phase: fmean(ranks.get(phase) or [0.0]) for phase in PHASES}
    means["other"] = seconds - sum(mean for phase, mean in means.items() if phase != "other")
    return Step(seconds, means, found.communication or {})


def compute_seconds(phases: Phases) -> list[float]:
    """Return the seconds of each rank in forward and backward."""
    ranks = phases.ranks or {}
    return [forward + backward for forward, backward in zip(*(ranks[phase] for phase in COMPUTE), strict=True)]


def of_rank(phases: Phases, rank: int) -> list[float]:
    """Return the seconds of one rank in each of :data:`PHASES`."""
    ranks = phases.ranks or {}
    return [ranks[phase][rank] if phase in ranks else 0.0 for phase in PHASES]


def shown_ranks(phases: Phases) -> dict[str, int]:
    """Return the ranks to show, by title: all, or for many the slowest and the fastest in forward and backward."""
    seconds = compute_seconds(phases)
    if len(seconds) <= MOST_RANKS:
        return {rank_name(phases, rank): rank for rank in range(len(seconds))}
    ends = {"slowest": seconds.index(max(seconds)), "fastest": seconds.index(min(seconds))}
    return {f"{end}: {rank_name(phases, rank)}": rank for end, rank in ends.items()}


def rank_name(phases: Phases, rank: int) -> str:
    """``rank 3``; in a pipeline ``rank 3 (stage 3)``, ``rank 0 (stages 0, 3)``."""
    stages = phases.stages[rank] if phases.stages else []
    named = f" (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})" if stages else ""
    return f"rank {rank}{named}"


def missing(record: Written) -> str | None:
    """Return why a record has no phases to show, and what to do; ``None`` if it has phases."""
    phases = part(record, Phases)
    if not record.get("model"):
        return f"workload={record.get('workload')} does not train, so it has no phases; give a run of workload=train"
    if phases.steps:
        wrong = _fault(phases)
        return f"its phases are damaged: {wrong}; run it again" if wrong else None
    return f"no phases: {phases.reason or _reason(record)}"


def _reason(record: Written) -> str:
    """Return why a training run has no phases."""
    if is_open(record):
        return "the run has not ended"
    if record["status"] != "ok":
        return f"the run did not finish ({record['status']}), and they are taken after the last step"
    profile = option(record, "profile", dict)
    if profile is None:
        version = part(record, Environment).ptdbench
        return f"written by an earlier version{f' ({version})' if version else ''}; run it again"
    if steps := profile.get("steps"):
        return f"the {steps} profiled steps after the timed ones failed or were interrupted; run it again"
    return "profile.steps=0; run it again with profile.steps=5"


def _fault(phases: Phases) -> str | None:
    """Find errors that the schema cannot detect: missing fields, and lists of different lengths."""
    ranks = phases.ranks or {}
    if not phases.step_seconds:
        return "step_seconds must be above 0"
    if absent := [phase for phase in COMPUTE if not ranks.get(phase)]:
        return f"ranks.{absent[0]} is missing"
    lengths = {len(numbers) for numbers in ranks.values()}
    lengths |= {len(of_ranks) for of_ranks in (phases.stages, phases.waited_for) if of_ranks}
    if len(lengths) > 1:
        return f"lists for {' and '.join(map(str, sorted(lengths)))} ranks"
    return None


#: Fields that must be equal for the steps of two runs to be the same work, and their display formats.
_WORK = {
    "model": "model={}",
    "parameters": "{} parameters",
    "tokens_per_sample": "{} tokens a sample",
    "global_batch": "train.global_batch={}",
    "precision": "precision={}",
}


def work_difference(one: Written, other: Written) -> str | None:
    """Return how the work of two runs differs, which makes their steps incomparable; ``None`` if it does not."""
    for field, form in _WORK.items():
        if one.get(field) != other.get(field):
            return " and ".join(form.format(record.get(field)) for record in (one, other))
    return None


def groups(records: Mapping[_Key, _Run]) -> list[dict[_Key, _Run]]:
    """Group the runs that did the same work, in order of first appearance."""
    alike = grouped((tuple(map(record.get, _WORK)), (key, record)) for key, record in records.items())
    return [dict(group) for group in alike.values()]
