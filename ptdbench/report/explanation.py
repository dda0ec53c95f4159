"""The output of ``ptdbench explain``: where time and memory of a step went, and why one run is faster than another."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import to_builtins

from ptdbench.comparison import ranking
from ptdbench.comparison.alternatives import Alternative, of_sweeps
from ptdbench.comparison.ranking import Standing
from ptdbench.records.load import is_run, read
from ptdbench.records.run_record import RunRecord
from ptdbench.report import breakdown, labels, recorded_phases, virtual, why
from ptdbench.report.text import wrap
from ptdbench.terminal import plural


class Refused(Exception):
    """Nothing can be explained; the message has a line for each reason."""


@dataclass
class Group:
    """Runs that did the same work, in the order of their table."""

    reference: str  #: The name of the run that others are compared with.
    runs: dict[str, RunRecord]  #: The typical run of each alternative, by name.
    repeats: list[int]  #: The number of runs of each alternative.
    lines: list[str]  #: Why the others are slower or take more memory; empty for a single run.


@dataclass
class Explanation:
    """The explanation of runs."""

    groups: list[Group]  #: Measured runs.
    #: Runs on virtual GPUs, by name; they have no times.
    virtual: dict[str, RunRecord] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  #: Why other runs are not explained.


def explain(directories: Sequence[Path]) -> Explanation:
    """Explain the runs of directories, each run once.

    Raises:
        Refused: There is nothing to explain.
    """
    unique = {Path(run.directory).resolve(): run for directory in directories for run in read(directory)}
    runs = list(unique.values())
    imitated = [run for run in runs if virtual.has_figures(run)]
    explanation = Explanation([], virtual=dict(zip(labels.names(imitated), imitated, strict=True)))
    if len(runs) == 1 and is_run(directories[0]):
        if not imitated and (reasons := _without_phases(runs)):
            raise Refused("\n".join(reasons))
        if not recorded_phases.missing(runs[0]):  # a virtual run has none
            (called,) = labels.names(runs)
            explanation.groups.append(Group(called, {called: runs[0]}, [1], []))
        return explanation
    others = [run for run in runs if not virtual.has_figures(run)]
    explanation.reasons += _without_phases(others)
    if not imitated and len(explanation.reasons) == len(others):
        raise Refused("\n".join(explanation.reasons))
    measured = [run for run in others if not run.kind]
    for places in ranking.of_models(of_sweeps(run for run in measured if run.model)):
        explanation.groups += _of_model(places)
    return explanation


def render(explanation: Explanation, width: int) -> str:
    """Return tables and lines; for a single run, a table of its ranks."""
    blocks = [_text(group, width) for group in explanation.groups]
    blocks += [virtual.explained(run, name, width) for name, run in explanation.virtual.items()]
    return "\n\n".join([*blocks, *(["\n".join(explanation.reasons)] if explanation.reasons else [])])


def as_json(explanation: Explanation) -> dict[str, object]:
    """Return the explanation as printed by ``--json``; docs/results.md describes each key."""
    imitated = [
        {
            "run": name,
            "directory": run.directory,
            **{group: run.written.get(group) for group in ("virtual", "memory", "predicted")},
        }
        for name, run in explanation.virtual.items()
    ]
    return {"groups": [*map(_as_json, explanation.groups)], "virtual": imitated, "not_explained": explanation.reasons}


def _text(group: Group, width: int) -> str:
    called, first = next(iter(group.runs.items()))
    title = labels.title([first], [f"batch {first.global_batch}"] if first.global_batch else [])
    if not group.lines:
        return f"{title}\n{breakdown.of_ranks(first, called, width)}"
    return "\n".join([title, breakdown.of_runs(group.runs, width), "", *(wrap(line, width) for line in group.lines)])


def _as_json(group: Group) -> dict[str, object]:
    reference, runs = group.runs[group.reference], []
    for (called, run), repeats in zip(group.runs.items(), group.repeats, strict=True):
        step = recorded_phases.step(run)
        runs.append({
            "run": called,
            "directory": run.directory,
            "runs": repeats,
            "step_seconds": step.seconds,
            "phases": step.phases,
            "communication": to_builtins(step.operations),
            "slower_by": None if run is reference else why.parts_of_difference(run, reference),
            "memory": breakdown.memory_of_largest_rank(run),
            "remarks": list(why.remarks(run, called)),
        })  # fmt: skip
    return {"reference": group.reference, "runs": runs, "lines": group.lines}


def _of_model(places: Sequence[Standing]) -> list[Group]:
    """Group the alternatives that did the same work, using their runs with phases."""
    is_known = any(place.against_best for place in places)
    phased = [
        replace(place, alternative=Alternative(kept, {}))
        for place in places
        if (kept := [run for run in place.alternative.runs if not recorded_phases.missing(run)])
    ]
    typical = {number: place.alternative.median_run for number, place in enumerate(phased)}
    groups = recorded_phases.groups(typical)
    return [_side_by_side([phased[number] for number in group], is_known) for group in groups]


def _side_by_side(places: Sequence[Standing], is_known: bool) -> Group:
    """Explain why the first run is faster, if that is known, or else compare the typical runs."""
    named = dict(zip(labels.names([place.alternative.median_run for place in places]), places, strict=True))
    runs = {name: place.alternative.median_run for name, place in named.items()}
    (reference, first), *others = runs.items()
    if others and not is_known:
        lines = [why.compare(run, first, name, reference) for name, run in others]
    else:
        (behind,) = why.in_order(named)
        lines = why.against_first([behind])
        if tied := [name for name, _ in others if name not in behind]:
            lines.append(f"{', '.join(tied)}: not significantly slower than {reference}, so not explained")
    lines += [line for name, run in others for line in breakdown.compare_memory(run, first, name, reference)]
    repeats = [len(place.alternative.runs) for place in places]
    if max(repeats) > 1:
        listed = ", ".join(f"{name} ({plural(count, 'run')})" for name, count in zip(named, repeats, strict=True))
        lines.append(f"shown: the run with the median throughput of {listed}")
    return Group(reference, runs, repeats, lines)


def _without_phases(runs: Sequence[RunRecord]) -> list[str]:
    return [f"{run.directory}: {reason}" for run in runs if (reason := recorded_phases.missing(run))]
