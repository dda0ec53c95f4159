"""``ptdbench explain outputs/<sweep or run>``: where time and memory of a step went, and why a run is faster."""

import argparse
import sys
from pathlib import Path

from ptdbench.terminal import echo, width

HELP = "time and memory breakdown of a step, and why one run is faster than another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``explain``."""
    words = "of runs, sweeps or folders of them"
    parser.add_argument("directories", nargs="+", type=Path, metavar="directory", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for other tools")


def main(arguments: argparse.Namespace) -> int:
    """Print tables and figures; the exit status is 1 if nothing can be explained."""
    from ptdbench import files
    from ptdbench.report import explanation

    try:
        explained = explanation.explain(arguments.directories)
    except explanation.Refused as refusal:
        echo(str(refusal), sys.stderr)
        return 1
    if arguments.json:
        echo(files.as_text(explanation.as_json(explained)))
    else:
        echo(explanation.render(explained, width()))
    return 0
