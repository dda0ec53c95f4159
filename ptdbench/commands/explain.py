"""``ptdbench explain outputs/<sweep or run>``: where time and memory of a step went, and why a run is faster."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ptdbench.terminal import echo, plural

if TYPE_CHECKING:
    from ptdbench.comparison.ranking import Place
    from ptdbench.records.load import Run

HELP = "where the time and the memory of a step went, and why one run is faster than another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is typed after ``explain``."""
    parser.add_argument("directory", type=Path, help="a run's directory, or a sweep's")
    parser.add_argument("--against", type=Path, metavar="RUN", help="another run, to compare a run with")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for other tools")


class _Refused(Exception):
    """Nothing can be explained; the message has a line for each reason."""


@dataclass
class _Group:
    """Runs that did the same work, in the order of their table."""

    reference: str  #: The one that others are compared with.
    runs: dict[str, Run]  #: The typical run of each alternative, by what it is called.
    repeats: list[int]  #: How many runs each one stands for.
    lines: list[str]  #: Why the others are slower, and what takes more memory.


@dataclass
class _Found:
    """The runs to explain."""

    groups: list[_Group]  #: Measured runs.
    #: Runs on virtual GPUs, by what they are called; they have no times.
    virtual: dict[str, Run] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  #: Why other runs are not explained.


def main(arguments: argparse.Namespace) -> int:
    """Print tables and lines of figures; the exit status is 1 where nothing can be explained."""
    from ptdbench import files
    from ptdbench.report import text, virtual

    width = shutil.get_terminal_size((110, 24)).columns
    try:
        found = _found(arguments.directory, arguments.against)
    except _Refused as refusal:
        echo(str(refusal), sys.stderr)
        return 1
    if arguments.json:
        imitated = [
            {"run": name, "directory": str(run.directory), "virtual": run["virtual"], "memory": run.get("memory")}
            for name, run in found.virtual.items()
        ]
        shown = {"groups": [*map(_as_json, found.groups)], "virtual": imitated, "not_explained": found.reasons}
        echo(files.as_text(shown))
    else:
        blocks = [_text(group, width) for group in found.groups]
        blocks += [virtual.explained(run, name, width) for name, run in found.virtual.items()]
        text.show("\n\n".join([*blocks, *(["\n".join(found.reasons)] if found.reasons else [])]))
    return 0


def _found(directory: Path, other: Path | None) -> _Found:
    """Find the runs to explain in a directory, or in two runs."""
    from ptdbench.records.load import load_telling
    from ptdbench.report import labels, recorded_phases, virtual

    if other:
        return _Found([_pair(directory, other)])
    loaded = load_telling(directory)
    runs = loaded if isinstance(loaded, list) else [loaded]
    imitated = [run for run in runs if virtual.has_figures(run)]
    found = _Found([], virtual=dict(zip(labels.names(imitated), imitated, strict=True)))
    if not isinstance(loaded, list):
        if not imitated:
            _require_phases(loaded)
        if not recorded_phases.missing(loaded):  # a virtual run has them where its GPUs take their time
            (called,) = labels.names([loaded])
            found.groups.append(_Group(called, {called: loaded}, [1], []))
        return found
    measured = [run for run in runs if not run.get("kind")]
    found.reasons += [f"{run.directory}: {reason}" for run in measured if (reason := recorded_phases.missing(run))]
    if not imitated and len(found.reasons) == len(measured):
        raise _Refused("\n".join(found.reasons))
    for places, is_known in _ranked(measured):
        numbered = {str(number): place.alternative.median_run for number, place in enumerate(places)}
        for same_work in recorded_phases.groups(numbered):
            found.groups.append(_side_by_side([places[int(number)] for number in same_work], is_known))
    return found


def _text(group: _Group, width: int) -> str:
    """Tables and lines; of a run by itself its ranks."""
    from ptdbench.report import breakdown
    from ptdbench.report.text import wrap

    called, first = next(iter(group.runs.items()))
    if not group.lines:
        return f"{breakdown.title(first)}\n{breakdown.of_ranks(first, called, width)}"
    shown = [wrap(line, width) for line in group.lines]
    return "\n".join([breakdown.title(first), breakdown.of_runs(group.runs, width), "", *shown])


def _as_json(group: _Group) -> dict[str, Any]:
    """The group as ``--json`` prints it; docs/results.md says what each key means."""
    from msgspec import to_builtins

    from ptdbench.report import breakdown, recorded_phases, why

    reference, runs = group.runs[group.reference], []
    for (called, run), repeats in zip(group.runs.items(), group.repeats, strict=True):
        step = recorded_phases.step(run)
        runs.append({
            "run": called,
            "directory": str(run.directory),
            "runs": repeats,
            "step_seconds": step.seconds,
            "phases": step.phases,
            "communication": to_builtins(step.operations),
            "slower_by": None if run is reference else why.parts_of_difference(run, reference),
            "memory": breakdown.memory_of_largest_rank(run),
            "remarks": list(why.remarks(run, called)),
        })  # fmt: skip
    return {"reference": group.reference, "runs": runs, "lines": group.lines}


def _ranked(runs: Sequence[Run]) -> Iterator[tuple[list[Place], bool]]:
    """For each model its alternatives in the order of their table, by their runs that have phases.

    And whether anything is known of that order.
    """
    from ptdbench.comparison import noise, ranking
    from ptdbench.comparison.alternatives import Alternative, of_sweeps
    from ptdbench.report import recorded_phases

    models: dict[str, list[Run]] = {}
    for run in runs:
        if run.get("model"):
            models.setdefault(run["model"], []).append(run)
    for of_model in models.values():
        found = ranking.rank(of_sweeps(of_model), noise.look_up(of_model))
        phased = [[run for run in place.alternative.runs if not recorded_phases.missing(run)] for place in found.places]
        places = [
            replace(place, alternative=Alternative(kept, {}))
            for place, kept in zip(found.places, phased, strict=True)
            if kept
        ]
        yield places, found.is_known


def _side_by_side(places: Sequence[Place], is_known: bool) -> _Group:
    """Runs that did the same work in the order of their table, and why the first one is faster.

    Of repeats the typical one is shown.
    """
    from ptdbench.report import breakdown, labels

    runs = [cast("Run", place.alternative.median_run) for place in places]
    named = dict(zip(labels.names(runs), places, strict=True))
    called = dict(zip(named, runs, strict=True))
    (reference, first), *others = called.items()
    lines = _why(named, is_known)
    lines += [line for name, run in others for line in breakdown.compare_memory(run, first, name, reference)]
    repeats = [len(place.alternative.runs) for place in places]
    if max(repeats) > 1:
        listed = ", ".join(f"{name} ({plural(count, 'run')})" for name, count in zip(named, repeats, strict=True))
        lines.append(f"shown: the run with the median throughput of {listed}")
    return _Group(reference, called, repeats, lines)


def _why(named: Mapping[str, Place], is_known: bool) -> list[str]:
    """Explain why each is slower than the first one, where that is known; else show what these runs say."""
    from ptdbench.report import why

    (reference, first), *others = ((name, place.alternative.median_run) for name, place in named.items())
    if not is_known and others:
        return [why.compare(run, first, name, reference) for name, run in others]
    (behind,) = why.in_order(named)
    tied = [name for name, _ in others if name not in behind]
    left_out = f"{', '.join(tied)}: no order vs {reference} is known, not explained"
    return [*why.against_first([behind]), *([left_out] if tied else [])]


def _pair(directory: Path, other: Path) -> _Group:
    """One run against another."""
    from ptdbench.report import breakdown, labels, recorded_phases, why

    run, against = _single(directory), _single(other)
    _require_phases(run, against)
    if difference := recorded_phases.other_work(run, against):
        rule = f"they did other work, {difference}; give two runs of the same model, global batch and precision"
        raise _Refused(f"{directory} and {other}: {rule}")
    if directory.resolve() == other.resolve():
        raise _Refused(f"{directory} and {other}: they are the same run; give two")
    called, reference = labels.names([run, against])
    lines = [why.compare(run, against, called, reference), *breakdown.compare_memory(run, against, called, reference)]
    return _Group(reference, {called: run, reference: against}, [1, 1], lines)


def _single(directory: Path) -> Run:
    from ptdbench.records.load import load_telling

    found = load_telling(directory)
    if isinstance(found, list):
        names = ", ".join(str(run.directory) for run in found[:3])
        raise _Refused(f"{directory}: --against compares two runs, and this is a folder of them; try {names}")
    return found


def _require_phases(*runs: Run) -> None:
    from ptdbench.report import recorded_phases

    if reasons := [f"{run.directory}: {reason}" for run in runs if (reason := recorded_phases.missing(run))]:
        raise _Refused("\n".join(reasons))
