"""The phases of a step, read from a record for all displays, and why a record has none."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ptdbench.grouping import grouped
from ptdbench.profiling.phases import PHASES
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Communication, Phases

_Key = TypeVar("_Key")

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
        exposed = {name: parts.exposed_seconds for name, parts in self.operations.items()}
        parts: dict[str, float] = {}
        for phase, seconds in self.phases.items():
            parts |= exposed if phase == "communication" else {phase: seconds}
        return parts | {"other": self.seconds - sum(parts.values()) + parts["other"]}


def step(record: RunRecord) -> Step:
    """Return the mean timed step of a run with phases."""
    seconds, ranks = record.phases.step_seconds or 0.0, record.phases.ranks or {}
    means = {phase: fmean(ranks.get(phase) or [0.0]) for phase in PHASES}
    means["other"] = seconds - sum(mean for phase, mean in means.items() if phase != "other")
    return Step(seconds, means, record.phases.communication or {})


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


def missing(record: RunRecord) -> str | None:
    """Return why a record has no phases to show, and what to do; ``None`` if it has phases."""
    if not record.model:
        return f"workload={record.workload} does not train, so it has no phases; give a run of workload=train"
    if record.phases.steps:
        wrong = _fault(record.phases)
        return f"its phases are damaged: {wrong}; run it again" if wrong else None
    return f"no phases: {record.phases.reason or _reason(record)}"


def _reason(record: RunRecord) -> str:
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
    if absent := [phase for phase in COMPUTE if not ranks.get(phase)]:
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


def groups(records: Mapping[_Key, RunRecord]) -> list[dict[_Key, RunRecord]]:
    """Group the runs that did the same work, in order of first appearance."""
    alike = grouped((tuple(_work(record).values()), (key, record)) for key, record in records.items())
    return [dict(group) for group in alike.values()]
