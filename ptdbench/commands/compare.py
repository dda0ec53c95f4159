"""``ptdbench compare outputs/<before> outputs/<after>``: what became faster or slower, with an exit status for CI."""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdbench.terminal import plural, say

HELP = "what became faster or slower between two sets of runs, with an exit status for CI"

#: Nothing could be compared.
UNUSABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is typed after ``compare``."""
    parser.add_argument("before", type=Path, help="a run's or a sweep's directory, or a folder of them")
    parser.add_argument("after", type=Path, help="another one; best with repeat=5 on both sides")
    parser.add_argument(
        "--fail-if-slower",
        type=_share,
        metavar="3%",
        help="exit status 1 only for what is slower by at least so much, and 3 where that would not have been seen",
    )
    parser.epilog = (
        "Exit status 0: nothing is seen to be slower. 1: a configuration is slower, or fails. 3: too few runs to "
        "tell; try repeat=5 or more. 2: the input cannot be compared."
    )


def _share(text: str) -> float:
    """``3%`` or ``0.03``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text or 'it'} must be a percentage above 0% and below 100%; try 3%")
    return share


def main(arguments: argparse.Namespace) -> int:
    """Print the table; the exit status is that of the gate, see :func:`ptdbench.report.versus.status`."""
    from ptdbench.records.store import Damaged
    from ptdbench.report import text, versus

    folders = (arguments.before, arguments.after)
    both = " and ".join(map(str, folders))
    try:
        sides = [_trained(folder) for folder in folders]
        if shared := _directories(sides[0]) & _directories(sides[1]):
            raise versus.Incomparable(f"both have {plural(len(shared), 'run')} in common; give two that share none")
        found = versus.match(*sides)
    except versus.Incomparable as refusal:
        say(f"{both}: {refusal}", sys.stderr)
        return UNUSABLE
    except (Damaged, _Refused) as refusal:
        say(str(refusal), sys.stderr)
        return UNUSABLE
    except OSError as error:
        say(f"{error.filename}: cannot be read: {error.strerror}" if error.filename else str(error), sys.stderr)
        return UNUSABLE
    text.show(versus.render(found, ("before", "after"), shutil.get_terminal_size((110, 24)).columns))
    return versus.status(found, arguments.fail_if_slower)


class _Refused(Exception):
    """A folder that has nothing to compare; the message names it."""


def _directories(runs: Sequence[Mapping[str, Any]]) -> set[Path]:
    return {Path(run["directory"]).resolve() for run in runs}


def _trained(folder: Path) -> list[dict[str, Any]]:
    """The records of the runs that train, with their directories of today, by which blocks of sweeps are told apart."""
    from ptdbench.records.load import load

    with warnings.catch_warnings(record=True) as damage:
        warnings.simplefilter("always")
        try:
            found = load(folder)
        finally:
            for one in damage:
                say(str(one.message), sys.stderr)
    runs = found if isinstance(found, list) else [found]
    trained = [{**run, "directory": str(run.directory)} for run in runs if run.get("model")]
    if not trained:
        raise _Refused(f"{folder}: has no run that trains; give runs of workload=train")
    return trained
