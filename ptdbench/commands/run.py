"""``ptdbench run outputs/<run>``: runs the given run directories with their saved configuration, in turn."""

import argparse
import shlex
from pathlib import Path

HELP = "start or continue the run in a directory; also under torchrun, srun and mpirun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``run``."""
    words = "directories of runs, each with a record.json"
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help=words)
    # For the script of a job, which has ranks started to find a micro-batch: see entry.find_micro_batch.
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--tries", type=shlex.split, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.epilog = "Exit status 0: every run was ok. 1: one was not, or could not be started. 128 + n: signal n."


def main(arguments: argparse.Namespace) -> int:
    """Execute the runs; never returns, as they may leave threads that keep this process alive."""
    from ptdbench import entry

    if arguments.tries:
        (directory,) = arguments.directories
        entry.exit_with(lambda: entry.find_micro_batch(directory, arguments.shape, arguments.tries))
    entry.exit_with(lambda: entry.execute_runs(arguments.directories))
