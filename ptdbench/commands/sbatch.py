"""``python -m ptdbench sbatch OVERRIDES > job.sh``: a run or a sweep as a plain SLURM script."""

from __future__ import annotations

import argparse
import sys

from ptdbench.terminal import say

HELP = "write a plain SLURM script for a run or a sweep of one shape"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is typed after ``sbatch``."""
    parser.add_argument("overrides", nargs="*", help="as for train.py")


def main(arguments: argparse.Namespace) -> int:
    """Print the script, and on standard error what its reader should know."""
    from ptdbench.sweep import script

    text, remarks = script.write(arguments.overrides)
    say(text.removesuffix("\n"))
    for remark in remarks:
        say(remark, sys.stderr)
    return 0
