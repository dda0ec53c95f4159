"""``ptdbench explain outputs/<sweep or run>``: where time and memory of a step went, and why a run is faster."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ptdbench.terminal import plural, say

if TYPE_CHECKING:
    from ptdbench.records.load import Run, Runs
    from ptdbench.report.ranking import Place

HELP = "where the time and the memory of a step went, and why one run is faster than another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is typed after ``explain``."""
    parser.add_argument("directory", type=Path, help="a run's directory, or a sweep's")
    parser.add_argument("--against", type=Path, metavar="RUN", help="another run, to compare a run with")


class _Refused(Exception):
    """Nothing can be explained; the message has a line for each reason."""


def main(arguments: argparse.Namespace) -> int:
    """Print tables and lines of figures; the exit status is 1 where nothing can be explained."""
    from ptdbench.records.store import Damaged
    from ptdbench.report import text

    width = shutil.get_terminal_size((110, 24)).columns
    try:
        if arguments.against:
            shown = _pair(arguments.directory, arguments.against, width)
        else:
            shown = _all(arguments.directory, width)
    except (_Refused, Damaged) as refusal:
        say(str(refusal), sys.stderr)
        return 1
    except OSError as error:
        say(f"{error.filename}: cannot be read: {error.strerror}" if error.filename else str(error), sys.stderr)
        return 1
    text.show(shown)
    return 0


def _all(directory: Path, width: int) -> str:
    """The ranks of a run; of a sweep or a folder the runs that did the same work beside each other."""
    from ptdbench.report import breakdown, labels, phases, virtual

    found = _load(directory)
    if not isinstance(found, list):
        (called,) = labels.names([found])
        if virtual.is_ok(found):
            lines = [virtual.explained(found, called, width)]
            return "\n\n".join([*lines, *([] if phases.missing(found) else [breakdown.of_ranks(found, called, width)])])
        _require_phases(found)
        return f"{breakdown.title(found)}\n{breakdown.of_ranks(found, called, width)}"
    imitated = [run for run in found if virtual.is_ok(run)]
    measured = [run for run in found if run.get("kind") != "virtual"]
    reasons = [f"{run.directory}: {reason}" for run in measured if (reason := phases.missing(run))]
    if len(reasons) == len(found):
        raise _Refused("\n".join(reasons))
    ranked = list(_ranked(measured))
    blocks = [_side_by_side(group, known, width) for places, known in ranked for group in _of_same_work(places)]
    blocks += [virtual.explained(run, name, width) for run, name in zip(imitated, labels.names(imitated), strict=True)]
    return "\n\n".join([*blocks, *(["\n".join(reasons)] if reasons else [])])


def _ranked(runs: Sequence[Run]) -> Iterator[tuple[list[Place], bool]]:
    """For each model its alternatives in the order of their table, by their runs that have phases.

    And whether anything is known of that order.
    """
    from ptdbench.records import noise
    from ptdbench.records.alternatives import Alternative
    from ptdbench.report import phases, ranking
    from ptdbench.report.sweeps import alternatives_of

    models: dict[str, list[Run]] = {}
    for run in runs:
        if run.get("model"):
            models.setdefault(run["model"], []).append(run)
    for of_model in models.values():
        found = ranking.rank(alternatives_of(of_model), noise.look_up(of_model))
        phased = [[run for run in place.alternative.runs if not phases.missing(run)] for place in found.places]
        places = [
            replace(place, alternative=Alternative(kept, {}))
            for place, kept in zip(found.places, phased, strict=True)
            if kept
        ]
        yield places, found.is_known


def _of_same_work(places: Sequence[Place]) -> list[list[Place]]:
    from ptdbench.report import phases

    numbered = {str(number): place.alternative.typical for number, place in enumerate(places)}
    return [[places[int(number)] for number in group] for group in phases.groups(numbered)]


def _side_by_side(places: Sequence[Place], is_known: bool, width: int) -> str:
    """Runs that did the same work in the order of their table, and why the first one is faster.

    Of repeats the typical one is shown.
    """
    from ptdbench.report import breakdown, memory
    from ptdbench.report.reason import wrap

    names = _called([cast("Run", place.alternative.typical) for place in places])
    named = dict(zip(names, places, strict=True))
    called = {name: place.alternative.typical for name, place in named.items()}
    (reference, first), *others = called.items()
    lines = _why(named, is_known)
    lines += [line for name, run in others for line in memory.compare(run, first, name, reference)]
    if any(len(place.alternative.runs) > 1 for place in places):
        listed = ", ".join(f"{name} ({plural(len(place.alternative.runs), 'run')})" for name, place in named.items())
        lines.append(f"shown: the run with the median throughput of {listed}")
    shown = [wrap(line, width) for line in lines]
    return "\n".join([breakdown.title(first), breakdown.of_runs(called, width), "", *shown])


def _why(named: Mapping[str, Place], is_known: bool) -> list[str]:
    """Why each is slower than the first one, where that is known; where nothing is, what these very runs say."""
    from ptdbench.report import why

    (reference, first), *others = ((name, place.alternative.typical) for name, place in named.items())
    if not is_known and others:
        return [why.compare(run, first, name, reference) for name, run in others]
    (behind,) = why.in_order(named)
    tied = [name for name, _ in others if name not in behind]
    left_out = f"{', '.join(tied)}: no order vs {reference} is known, not explained"
    return [*why.against_first([behind]), *([left_out] if tied else [])]


def _pair(directory: Path, other: Path, width: int) -> str:
    """One run against another."""
    from ptdbench.report import breakdown, memory, phases, why
    from ptdbench.report.reason import wrap

    run, against = _single(directory), _single(other)
    _require_phases(run, against)
    if difference := phases.other_work(run, against):
        rule = f"they did other work, {difference}; give two runs of the same model, global batch and precision"
        raise _Refused(f"{directory} and {other}: {rule}")
    if directory.resolve() == other.resolve():
        raise _Refused(f"{directory} and {other}: they are the same run; give two")
    called, reference = _called([run, against])
    table = breakdown.of_runs({called: run, reference: against}, width)
    lines = [why.compare(run, against, called, reference), *memory.compare(run, against, called, reference)]
    shown = "\n".join(wrap(line, width) for line in lines)
    return f"{breakdown.title(run)}\n{table}\n\n{shown}"


def _load(directory: Path) -> Run | Runs:
    """The records, with a line on standard error for each one that is damaged."""
    from ptdbench.records.load import load_telling

    return load_telling(directory, lambda damage: say(damage, sys.stderr))


def _single(directory: Path) -> Run:
    found = _load(directory)
    if isinstance(found, list):
        names = ", ".join(str(run.directory) for run in found[:3])
        raise _Refused(f"{directory}: --against compares two runs, and this is a folder of them; try {names}")
    return found


def _require_phases(*runs: Run) -> None:
    from ptdbench.report import phases

    if reasons := [f"{run.directory}: {reason}" for run in runs if (reason := phases.missing(run))]:
        raise _Refused("\n".join(reasons))


def _called(runs: Sequence[Run]) -> list[str]:
    """What runs of one model are called; where that does not tell them apart, with their directories."""
    from ptdbench.report import labels

    called = labels.names(runs)
    return [
        f"{name.removesuffix(f' [{run.directory.name}]')} [{run.directory}]" if called.count(name) > 1 else name
        for name, run in zip(called, runs, strict=True)
    ]
