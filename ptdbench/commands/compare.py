"""``ptdbench compare outputs/<before> outputs/<after>``: what became faster or slower, with an exit status for CI."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ptdbench.problems import Problem, require
from ptdbench.terminal import command, echo, from_here, plural, width

if TYPE_CHECKING:
    from ptdbench.records.run_record import RunRecord
    from ptdbench.setup.config import Repeat

HELP = "what became faster or slower between two sets of runs, with an exit status for CI"

#: Nothing could be compared.
UNUSABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``compare``."""
    words = "two directories, of runs, sweeps or folders of them; with --python or --checkout what both sides run"
    parser.add_argument("words", nargs="*", metavar="before after", help=words)
    let_run = "give twice: run the options after -- under both interpreters alternately, with repeat=5 by default"
    parser.add_argument("--python", action="append", default=[], metavar="PYTHON", help=let_run)
    checkout = "give twice: the same at two commits of the repository in this directory"
    parser.add_argument("--checkout", action="append", default=[], metavar="COMMIT", help=checkout)
    parser.add_argument(
        "--fail-if-slower",
        type=_share,
        metavar="PERCENT",
        help="exit with 1 only if a configuration is slower by at least PERCENT, with 3 if that cannot be ruled out",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for other tools")
    parser.epilog = (
        "Exit status 0: nothing is seen to be slower. 1: a configuration is slower, or fails; with --fail-if-slower "
        "also if its final loss differs. 3: too few runs to tell; try repeat=5 or more. 2: the "
        "input cannot be compared, or has damaged records."
    )


def _share(text: str) -> float:
    """Parse a share: ``3%`` or ``0.03``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text or 'it'} must be a percentage above 0% and below 100%; try 3%")
    return share


def main(arguments: argparse.Namespace) -> int:
    """Print the table; for the exit status see :func:`ptdbench.report.versus.status`."""
    from ptdbench import files
    from ptdbench.report import steps, text, versus

    try:
        together = _run_both_sides(arguments) if arguments.python or arguments.checkout else None
        if not together and len(arguments.words) != 2:
            rule = "takes two directories, before and after"
            remedy = "give both, or --python or --checkout twice"
            require(Problem("compare", " ".join(arguments.words), rule, remedy))
        folders = [together / "before", together / "after"] if together else [*map(Path, arguments.words)]
        damaged: list[str] = []
        sides = [_trained(folder, damaged) for folder in folders]
        before, after = ({Path(run.directory).resolve() for run in side} for side in sides)
        if shared := before & after:
            raise versus.Incomparable(f"both have {plural(len(shared), 'run')} in common; give two that share none")
        comparison = versus.match(*sides)
    except versus.Incomparable as refusal:
        echo(f"{' and '.join(map(str, folders))}: {refusal}", sys.stderr)
        return UNUSABLE
    status = versus.status(comparison, arguments.fail_if_slower)
    if damaged and status != 1:  # what is missing may be slower
        status = UNUSABLE
    if arguments.json:
        echo(files.as_text(versus.as_json(comparison, arguments.fail_if_slower) | {"status": status}))
        return status
    titles = tuple(arguments.checkout) or ("before", "after")
    echo(versus.render(comparison, titles, width()))
    for line in versus.gate(comparison, arguments.fail_if_slower) if arguments.fail_if_slower else ():
        echo(text.wrap(f"--fail-if-slower: {line}", width()))
    shown = shlex.join(map(str, [from_here(together)] if together else folders))
    if together:  # one folder contains all runs
        echo(f"records      {shown}")
        if any(steps.why_no_phases(run) is None for side in sides for run in side):
            echo(f"phases       {command('explain')} {shown}")
    echo(f"report       {command('report')} {shown}")
    if status == UNUSABLE:
        echo(f"{plural(len(damaged), 'record')} cannot be read, see above: what is compared is not all", sys.stderr)
    return status


def _run_both_sides(arguments: argparse.Namespace) -> Path:
    """Run both sides alternately; return the folder of their results, and print it if they are incomplete."""
    from ptdbench import files, search_path
    from ptdbench.launch import local

    for name, values in (("--python", arguments.python), ("--checkout", arguments.checkout)):
        if values and (len(values) != 2 or (arguments.python and arguments.checkout)):
            remedy = "give --python twice, or --checkout twice"
            require(Problem(name, ", ".join(values), "two sides are compared", remedy))
    search_path.add_current()
    from ptdbench.records import store
    from ptdbench.sweep import alternating

    def fill(new: Path, _: Path) -> None:
        typed = {"python": arguments.python, "checkout": arguments.checkout, "overrides": arguments.words}
        files.write_json(new / "compare.json", typed)

    name = time.strftime("%Y-%m-%d_%H-%M-%S_compare")
    try:
        with local.stopping(), ExitStack() as until_done:
            overrides, repeat = _repeats(arguments.words)
            if arguments.python:
                sides = alternating.interpreters(arguments.python)
            else:
                sides = until_done.enter_context(alternating.checkouts(arguments.checkout, overrides))
            directory = store.claim_directory(Path("outputs").absolute(), name, "outputs", fill)
            try:
                alternating.run(sides, overrides, repeat, directory)
            except BaseException:
                if store.run_directories(directory):
                    echo(f"records      {directory}")
                else:  # refused, or stopped before the first run
                    shutil.rmtree(directory, ignore_errors=True)
                raise
    except local.Stopped as stop:
        if not isinstance(stop, alternating.StoppedSide):
            echo(str(stop), sys.stderr)
        raise SystemExit(128 + stop.signal) from None
    return directory


def _repeats(words: Sequence[str]) -> tuple[list[str], Repeat]:
    """Return the overrides without those of ``repeat``, and the options of ``repeat``, by default five runs."""
    from ptdbench.setup import commandline, compose

    typed = commandline.expand_shorthands(words)
    for word in typed:
        option, _, value = word.partition("=")
        if option == "workload" and value != "train":
            require(Problem(option, value, "only training can be compared", "omit it, or give workload=train"))
        if option in ("repeat.block", "repeat.series"):
            require(Problem(option, value, "is set for each block of both sides", "omit it"))
    of_repeat = [word for word in typed if commandline.option(word).startswith("repeat.")]
    repeat = compose.compose_all(["repeat.runs=5", *of_repeat], multirun=True).configs[0].repeat
    return [*(word for word in typed if word not in of_repeat), *commandline.short_runs(typed)], repeat


def _trained(folder: Path, damaged: list[str]) -> list[RunRecord]:
    """Return the measured training runs of a folder; raises FileNotFoundError if there are none.

    Messages about damaged records are added to ``damaged``.
    """
    from ptdbench.records.load import read

    trained = [run for run in read(folder, damaged) if run.model]
    if not trained:
        raise FileNotFoundError(f"{folder}: has no run that trains; give runs of workload=train")
    measured = [run for run in trained if not run.kind]
    if not measured:
        raise FileNotFoundError(f"{folder}: its runs are {trained[0].kind}, and take no time; give measured ones")
    if left := len(trained) - len(measured):
        echo(f"{folder}: {plural(left, 'run')} that took no time, virtual or planned: left out", sys.stderr)
    return measured
