"""``ptdbench sbatch OVERRIDES > job.sh``: a run or a sweep as a plain SLURM script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ptdbench.terminal import echo

HELP = "write a plain SLURM script for a run, or a sweep with one node and rank count"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``sbatch``."""
    parser.add_argument("overrides", nargs="*", help="as for train")
    parser.add_argument("--config-dir", "-cd", type=Path, help="one more folder of configurations, as for train")


def main(arguments: argparse.Namespace) -> int:
    """Print the script, and remarks on standard error."""
    from ptdbench import search_path

    search_path.add_current()
    from ptdbench.sweep import requests

    text, remarks = requests.write_script(arguments.overrides, arguments.config_dir)
    echo(text.removesuffix("\n"))
    for remark in remarks:
        echo(remark, sys.stderr)
    return 0
