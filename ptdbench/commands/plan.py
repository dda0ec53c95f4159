"""``ptdbench plan OPTIONS``: which layouts fit, with which micro-batch, and which of them is predicted to be fastest.

The options are those of ``train.py``; a list of values makes a row for each. With ``virtual=h100`` no GPUs are needed:
one rank of each kind runs on a virtual GPU.
"""

import argparse
from pathlib import Path

from ptdbench.commands import add_options

HELP = "predict memory and step times without GPUs: which layouts fit, and which is fastest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``plan``."""
    add_options(parser, "a list makes a row for each value")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead of a table")
    parser.add_argument("--again", action="store_true", help="ignore cached plans")
    parser.add_argument(
        "--anchor", type=Path, metavar="RUN", action="append", default=[],
        help="a run or sweep measured on such GPUs: sets the level of predicted times, in place of the latest runs in "
        "the cache; may be repeated",
    )  # fmt: skip
    parser.add_argument("--no-anchor", action="store_true", help="let no run in the cache set the level")
    parser.epilog = (
        "Exit status 0: a layout fits, or its training state if only that is known. 1: no layout fits, or "
        "none could be planned. 128 + n: signal n."
    )


def main(arguments: argparse.Namespace) -> int:
    """Plan, and print a table; never returns, as runs may leave threads that keep this process alive."""
    from ptdbench import entry

    entry.exit_with(lambda: entry.plan(arguments))
