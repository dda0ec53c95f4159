"""``ptdbench report outputs/<sweep>``: the results of a sweep in one file to send, as HTML, Markdown or LaTeX."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ptdbench.problems import Problem, require
from ptdbench.terminal import echo, plural

if TYPE_CHECKING:
    from ptdbench.records.run_record import RunRecord

HELP = "one file to send: tables, figures, failures and commands of sweeps as HTML, Markdown or LaTeX"

#: Extensions of files by the name of their option.
_FORMS = {"html": "html", "md": "md", "latex": "tex"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``report``."""
    words = "of runs, sweeps or folders of them"
    parser.add_argument("directories", nargs="+", type=Path, metavar="directory", help=words)
    parser.add_argument("--html", action="store_true", help="write report.html; the default")
    parser.add_argument("--md", action="store_true", help="write report.md, for pull requests")
    parser.add_argument("--latex", action="store_true", help="write report.tex, tables for papers, with booktabs")
    parser.add_argument("--title", help="the title; without it, models and directories")
    where = "where to write; without it, in the first directory"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=where)
    parser.add_argument("--force", action="store_true", help="overwrite what an earlier report wrote")


def main(arguments: argparse.Namespace) -> int:
    """Write the files; if nothing can be reported, nothing is written and the exit status is 1."""
    from ptdbench.files import replace_bytes
    from ptdbench.records.load import read

    unique = {Path(run.directory).resolve(): run for directory in arguments.directories for run in read(directory)}
    runs = list(unique.values())
    paths = _paths(arguments)
    title = arguments.title or _title(arguments.directories, runs)
    from ptdbench.report.markup import latex, markdown
    from ptdbench.report.page.document import page

    write: dict[str, Callable[[str, str, Sequence[RunRecord]], str]] = {"html": page, "md": markdown, "latex": latex}
    texts = {path: write[form](title, _subtitle(runs), runs) for form, path in paths.items()}
    for path, text in texts.items():
        replace_bytes(path, text.encode("utf-8", "backslashreplace"))
        echo(f"report       {path}")
    return 0


def _paths(arguments: argparse.Namespace) -> dict[str, Path]:
    forms = [form for form in _FORMS if getattr(arguments, form)] or ["html"]
    first = arguments.directories[0]
    folder = arguments.output or (first if first.is_dir() else first.parent)
    if arguments.output and not folder.is_dir():
        require(Problem("--output", folder, "there is no such folder", "create it, or give another one"))
    paths = {form: folder / f"report.{_FORMS[form]}" for form in forms}
    there = [path for path in paths.values() if path.exists()]
    if there and not arguments.force:
        remedy = "give --force to overwrite it, or --output with another folder"
        require(Problem("report", ", ".join(map(str, there)), "already exists", remedy))
    return paths


def _title(directories: Sequence[Path], runs: Sequence[RunRecord]) -> str:
    """Return the models, or without any the workloads, and the directories' names: ``gpt_tiny: 2026-11-28_sweep``."""
    from ptdbench.comparison.ranking import spoken
    from ptdbench.report.labels import short_paths

    subjects = dict.fromkeys(filter(None, (run.model for run in runs))) or dict.fromkeys(run.workload for run in runs)
    folders = (path.parent if path.is_file() else path for path in map(Path.resolve, directories))
    return f"{spoken([*subjects])}: {spoken([*short_paths(folders).values()])}"


def _subtitle(runs: Sequence[RunRecord]) -> str:
    from ptdbench.measure import hardware
    from ptdbench.report import virtual

    kinds = Counter("plan" if run.kind == "planned" else "run" for run in runs)
    words = Counter("too large" if virtual.does_not_fit(run) else run.status for run in runs)
    others = (f"{count} {word}" for word, count in words.items() if word != "ok")
    counted = ", ".join([*(plural(count, kind) for kind, count in kinds.items()), *others])
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{counted} · made by {hardware.this_package()} on {made}"
