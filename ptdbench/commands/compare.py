"""``ptdbench compare outputs/<before> outputs/<after>``: what became faster or slower, with an exit status for CI."""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ptdbench.terminal import say

if TYPE_CHECKING:
    from ptdbench.records.load import Run

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
        "Exit status 0: nothing is seen to be slower. 1: something is, or fails. 3: not enough data. 2: bad input."
    )


def _share(text: str) -> float:
    """``3%`` or ``0.03``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a percentage above 0% and below 100%; try 3%")
    return share


def main(arguments: argparse.Namespace) -> int:
    """Print the table; the exit status is that of the gate, see :func:`ptdbench.report.versus.status`."""
    from ptdbench.records.store import Damaged
    from ptdbench.report import text, versus

    folders = (arguments.before, arguments.after)
    try:
        if folders[0].resolve() == folders[1].resolve():
            raise versus.Incomparable("they are the same; give two")
        found = versus.match(*map(_trained, folders))
    except (versus.Incomparable, Damaged) as refusal:
        say(f"{' and '.join(map(str, folders))}: {refusal}", sys.stderr)
        return UNUSABLE
    except OSError as error:
        say(f"{error.filename}: cannot be read: {error.strerror}" if error.filename else str(error), sys.stderr)
        return UNUSABLE
    text.show(versus.render(found, ("before", "after"), shutil.get_terminal_size((110, 24)).columns))
    return versus.status(found, arguments.fail_if_slower)


def _trained(folder: Path) -> list[Run]:
    """The runs that train."""
    from ptdbench.records.load import load
    from ptdbench.report.versus import Incomparable

    with warnings.catch_warnings(record=True) as damage:
        warnings.simplefilter("always")
        try:
            found = load(folder)
        finally:
            for one in damage:
                say(str(one.message), sys.stderr)
    runs = [run for run in (found if isinstance(found, list) else [found]) if run.get("model")]
    if not runs:
        raise Incomparable(f"{folder} has no run that trains")
    return runs
