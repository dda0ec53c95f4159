"""``python -m ptdbench status outputs/<sweep>`` and ``python -m ptdbench sbatch OVERRIDES > job.sh``."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ptdbench.problems import ConfigError
from ptdbench.terminal import say


def main() -> int:
    """Exit status 0: it worked. 1: it could not be done, or a run of the sweep was not ok."""
    parser = argparse.ArgumentParser(prog="python -m ptdbench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status", help="where every run of a sweep stands: queue, step, result, seconds to start"
    )
    status.add_argument("directory", type=Path, help="the sweep's directory, or a run's")
    script = commands.add_parser("sbatch", help="write a plain SLURM script for a run or a sweep of one shape")
    script.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_args()
    try:
        return _status(arguments.directory) if arguments.command == "status" else _sbatch(arguments.overrides)
    except ConfigError as error:
        say(str(error), sys.stderr)
        return 1


def _status(directory: Path) -> int:
    from ptdbench.sweep import status, view

    try:
        sweep = status.look(directory)
    except FileNotFoundError:
        say(f"{directory}: there is no run and no sweep; give a directory below outputs", sys.stderr)
        return 1
    except OSError as error:
        say(f"{error.filename or directory}: cannot be read: {error.strerror or error}", sys.stderr)
        return 1
    width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None
    say(view.text(sweep, width))
    return int(any(run.is_over and run.record["status"] != "ok" for run in sweep.runs))


def _sbatch(overrides: list[str]) -> int:
    from ptdbench.sweep import script

    text, remarks = script.write(overrides)
    say(text.removesuffix("\n"))
    for remark in remarks:
        say(remark, sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
