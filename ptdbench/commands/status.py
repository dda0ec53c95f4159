"""``ptdbench status outputs/<sweep>``: the status of every run of a sweep."""

import argparse
import shutil
import sys
from pathlib import Path

from ptdbench.terminal import echo

HELP = "the state of every run of a sweep, and its final table once all have ended"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``status``."""
    parser.add_argument("directory", type=Path, help="of a sweep, a run, or a folder of runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for other tools")


def main(arguments: argparse.Namespace) -> int:
    """Print how each run goes, or the final table if all have ended.

    The exit status is 1 if a run was not ok or was killed, or nothing can be shown.
    """
    from ptdbench import files
    from ptdbench.records import store
    from ptdbench.sweep import status, watch

    directory = arguments.directory
    try:
        sweep = status.settle(directory)
    except FileNotFoundError:
        none = f"{directory}: there is no run and no sweep; give a directory below outputs"
        echo(store.without_runs(directory) if store.is_sweep(directory) else none, sys.stderr)
        return 1
    is_one = store.is_sweep(directory) or (directory / store.RECORD).exists()
    is_final = is_one and sweep.is_over and not (sweep.damage or arguments.json)
    width = shutil.get_terminal_size((0, 0)).columns or None  # all of it in a file, unless COLUMNS is set
    if not is_final or any(run.job for run in sweep.runs):
        explained = watch.table_text(sweep, width, explains=not is_final) + "\n" * is_final
        echo(files.as_text(watch.as_json(sweep)) if arguments.json else explained)
    if is_final:
        from ptdbench.records import ledger
        from ptdbench.records.record import DONE
        from ptdbench.report import table
        from ptdbench.setup import resume

        table.show_results(directory)
        left = [run.record for run in sweep.runs if run.record.status not in DONE]
        if store.is_sweep(directory) and ledger.read(directory).overrides and left:
            echo(f"resume       {resume.command(directory, left[0].sources or [], left[0].start_command)}")
    return int(bool(sweep.killed) or any(run.is_over and run.record.status != "ok" for run in sweep.runs))
