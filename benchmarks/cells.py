"""Tables of runs: a cell is a layout, which is its row, with the options of its column. What pages show of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.script import parser_of
from ptdbench.problems import ConfigError

#: What is said of a cell, by row and column.
Table = Mapping[str, Mapping[str, str]]


def parser_of_cells(
    description: str | None, rows: Iterable[str], columns: Iterable[str], between_rows: str = ","
) -> argparse.ArgumentParser:
    """A parser of the options by which some rows and columns are chosen, by default all."""
    parser = parser_of(description)
    for name, every, mark in (("--rows", [*rows], between_rows), ("--columns", [*columns], ",")):
        by = {",": "comma", ";": "semicolon"}[mark]
        parser.add_argument(name, type=partial(_some, every, mark), default=every, help=f"some of them, by {by}")
    return parser


def _some(every: Sequence[str], mark: str, typed: str) -> list[str]:
    """The names that were typed; raises where there is none of one."""
    chosen = typed.split(mark)
    if unknown := [name for name in chosen if name not in every]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; try {mark.join(every)}")
    return chosen


def refusal(error: ConfigError) -> str:
    """What is said of a cell that the product refuses."""
    problem = error.problems[0]
    return f"refused: {problem.option}={str(problem.value).lower()}: {problem.rule}"


def keep(path: Path, table: Table) -> None:
    """Write a table as JSON, with the version of torch."""
    path.write_text(json.dumps({"torch": torch.__version__, "cells": table}, indent=1) + "\n")


def drawn(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    return lines + [f"| {name} | {' | '.join(said)} |" for name, said in rows.items()]


def numbered(rows: Mapping[str, Sequence[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Rows with a number in place of each reason why a cell has no result, and the lines of these reasons."""
    numbers: dict[str, int] = {}

    def shown(said: str) -> str:
        is_short = said.startswith(("ok", "no"))  # no effect, not run
        return said if is_short else f"({numbers.setdefault(said, len(numbers) + 1)})"

    found = {row: [*map(shown, of_row)] for row, of_row in rows.items()}
    return found, [f"{number}. {said}" for said, number in numbers.items()]


def described(rows: Mapping[str, tuple[int, str]], columns: Mapping[str, str]) -> list[str]:
    """The lines that say what rows and columns are: ranks and options."""
    lines = [f"- *{name}*: `{options}`, {ranks} ranks" for name, (ranks, options) in rows.items()]
    return lines + [f"- *{name}*: `{options or 'no other option'}`" for name, options in columns.items()]


def inserted(text: str, name: str, table: str) -> str:
    """A page with another table between its comments of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"
