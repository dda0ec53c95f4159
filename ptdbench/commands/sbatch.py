"""``ptdbench sbatch OVERRIDES > job.sh``: a run or a sweep as a plain SLURM script."""

import argparse
import sys

from ptdbench.commands import add_options
from ptdbench.terminal import echo

HELP = "write a plain SLURM script for a run, or a sweep with one node and rank count"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``sbatch``."""
    add_options(parser, "lists run in one job, one run after the other")


def main(arguments: argparse.Namespace) -> int:
    """Print the script, and remarks on standard error."""
    from ptdbench import search_path

    search_path.add_current()
    from ptdbench.setup import compose
    from ptdbench.sweep import requests

    text, remarks = requests.write_script(arguments.overrides, compose.source(arguments))
    echo(text.removesuffix("\n"))
    for remark in remarks:
        echo(remark, sys.stderr)
    return 0
