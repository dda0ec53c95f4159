"""``ptdbench explain outputs/<sweep or run>``: where time and memory of a step went, and why a run is faster."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ptdbench.terminal import say

if TYPE_CHECKING:
    from ptdbench.records.load import Run, Runs

HELP = "where the time and the memory of a step went, and why one run is faster than another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is typed after ``explain``."""
    parser.add_argument("directory", type=Path, help="a run's directory, or a sweep's")
    parser.add_argument("--against", type=Path, metavar="RUN", help="another run, to compare a run with")


class _Refused(Exception):
    """Nothing can be explained; the message has a line for each reason."""


def main(arguments: argparse.Namespace) -> int:
    """Print tables and sentences; the exit status is 1 where nothing can be explained."""
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
    from ptdbench.report import breakdown, labels, phases

    found = _load(directory)
    if not isinstance(found, list):
        _require_phases(found)
        (called,) = labels.names([found])
        return f"{breakdown.title(found)}\n{breakdown.of_ranks(found, called, width)}"
    reasons = [f"{run.directory}: {reason}" for run in found if (reason := phases.missing(run))]
    groups = phases.groups({str(run.directory): run for run in found if not phases.missing(run)})
    if not groups:
        raise _Refused("\n".join(reasons))
    blocks = [_side_by_side(list(group.values()), width) for group in groups]
    return "\n\n".join([*blocks, *(["\n".join(reasons)] if reasons else [])])


def _side_by_side(runs: Sequence[Run], width: int) -> str:
    """Runs that did the same work, the fastest one first, and why it is; of repeats the typical one."""
    from ptdbench.report import breakdown, memory, why
    from ptdbench.report.reason import wrap

    repeats = _repeats(runs)
    ordered = sorted((one for one, _ in repeats), key=lambda run: run["phases"]["step_seconds"])
    called = dict(zip(_called(ordered), ordered, strict=True))
    (reference, fastest), *others = called.items()
    sentences = why.against_fastest(called)
    sentences += [line for name, run in others for line in memory.compare(run, fastest, name, reference)]
    if any(count > 1 for _, count in repeats):
        counts = {run.directory: count for run, count in repeats}
        listed = ", ".join(f"{counts[run.directory]} of {name}" for name, run in called.items())
        sentences.append(f"of repeats the one with the median throughput is shown; runs: {listed}")
    shown = [wrap(sentence, width) for sentence in sentences]
    return "\n".join([breakdown.title(ordered[0]), breakdown.of_runs(called, width), "", *shown])


def _repeats(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """The typical run of each alternative of each sweep, and how many there are."""
    from ptdbench.report.sweeps import alternatives_of

    return [(cast("Run", one.typical), len(one.runs)) for one in alternatives_of(runs)]


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
    sentences = [why.compare(run, against, called, reference), *memory.compare(run, against, called, reference)]
    shown = "\n".join(wrap(sentence, width) for sentence in sentences)
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
