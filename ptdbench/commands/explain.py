"""``ptdbench explain outputs/<sweep or run>``: where time and memory of a step went, and why a run is faster."""

import argparse
from pathlib import Path

from ptdbench.terminal import echo, width

HELP = "time and memory breakdown of a step, and why one run is faster than another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``explain``."""
    words = "of runs, sweeps or folders of them"
    parser.add_argument("directories", nargs="+", type=Path, metavar="directory", help=words)


def main(arguments: argparse.Namespace) -> int:
    """Print tables and figures; the exit status is 1 if nothing can be explained."""
    from ptdbench.report import explanation

    echo(explanation.explain(arguments.directories, width()))
    return 0
