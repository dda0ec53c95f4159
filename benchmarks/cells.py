"""Matrices of runs: a cell is a layout, which is its row, with the levers of its column."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import yaml

from benchmarks import tables
from benchmarks.script import ROOT, options, read
from ptdbench.problems import ConfigError
from ptdbench.setup import run_spec
from ptdbench.setup.config import Config

#: What all cells are compared with: ranks and options.
SINGLE = (1, "parallel=single")

#: Of layouts with a pipeline; a pipeline's option is left out without one.
PIPELINES = ("parallel=pdp", "parallel=3d", "pipeline")

M = TypeVar("M", bound="Matrix")

#: A row and a column.
Cell = tuple[str, str]

Cells = Mapping[Cell, Config]

Execute = Callable[[Cells], Iterable[tuple[Cell, str]]]


@dataclass(frozen=True)
class Matrix:
    """A matrix of runs, of ``matrices.yaml``.

    The verdict on a cell is ``ok`` with a figure, ``no effect``, ``refused:`` with the reason, or ``wrong:``.
    """

    common: str  #: The options that all cells share.
    rows: Mapping[str, tuple[int, str]]  #: The layouts: ranks and options.
    columns: Mapping[str, str]  #: The levers: options.
    page: str = ""  #: The page that shows the result.
    result: str = ""  #: The file of the result, JSON.
    head: str = ""  #: What stands above it: ``{ok}`` of ``{run}`` cells, ``{all}`` in all, with ``{torch}``.
    #: On virtual GPUs, the columns in which all ranks run, not only the first and the last one of a pipeline.
    all_ranks: Sequence[str] | None = None
    turns: Sequence[str] = ()  #: Of the zoo, columns of which each row has one by default, in turn.
    sizes: Mapping[str, int] = field(default_factory=dict)  #: Of the zoo's models of transformers, as far as they fit.

    @classmethod
    def load(cls: type[M], name: str) -> M:
        """Load a matrix by its name in ``matrices.yaml``."""
        return cls(**yaml.safe_load((tables.FOLDER / "matrices.yaml").read_text())[name])

    def words(self, row: str, column: str) -> list[str]:
        """Return the options of a cell; in the row ``single`` those for one rank, which has no replicas."""
        ranks, layout = self.rows.get(row, SINGLE)
        levers, has_stages = self.columns[column].split(), any(name in layout for name in PIPELINES)
        if row not in self.rows:
            levers = [word for word in levers if not word.startswith(("parallel.", "offload="))]
        elif not has_stages:
            levers = [word for word in levers if not word.startswith("parallel.microbatches")]
        if self.all_ranks and column not in self.all_ranks:
            levers.append(f"virtual.ranks=[0,{ranks - 1}]" if has_stages else "virtual.ranks=[0]")
        return [*self.common.split(), *layout.split(), *levers, f"cluster.ranks_per_node={ranks}"]

    def shown(self, text: str) -> str:
        """Return the page's text with the result in it."""
        return tables.inserted(text, "cells", self.drawn())

    def drawn(self) -> str:
        """Draw the stored result in Markdown, with a number in place of each reason why a cell has no result."""
        stored = json.loads((ROOT / self.result).read_text())
        cells, numbers = stored["cells"], dict[str, int]()

        def shown(verdict: str) -> str:
            is_short = verdict.startswith(("ok", "no"))  # no effect, not run
            return verdict if is_short else f"({numbers.setdefault(verdict, len(numbers) + 1)})"

        columns = [column for column in self.columns if any(column in row for row in cells.values())]
        present = [row for row in self.rows if row in cells]
        rows = [[row, *(shown(cells[row].get(column, "not run")) for column in columns)] for row in present]
        verdicts = [verdict for row in cells.values() for verdict in row.values()]
        count = {"run": len(verdicts), "ok": sum(verdict.startswith("ok") for verdict in verdicts)}
        head = self.head.format(**count, all=len(self.rows) * len(self.columns), torch=stored["torch"])
        reasons = [f"{number}. {verdict}" for verdict, number in numbers.items()]
        layouts = [f"- *{row}*: `{self.rows[row][1]}`, {self.rows[row][0]} ranks" for row in present]
        levers = [f"- *{column}*: `{self.columns[column] or 'no other option'}`" for column in columns]
        legend = "Rows and columns are these options:"
        table = tables.drawn(["", *columns], rows)
        return "\n".join([head, "", table, "", *reasons, "", legend, "", *layouts, *levers])

    def options(self, description: str | None, **flags: tuple[Any, ...]) -> argparse.Namespace:
        """Parse a command line that chooses rows and columns, all by default."""
        rows, columns = (*self.rows,), (*self.columns,)
        choices = {"rows": (rows, "some of them", rows), "columns": (columns, "some of them", columns)}
        return options(description, **choices | flags)

    def chosen(self, row: str, args: argparse.Namespace) -> Sequence[str]:
        """Return the columns of a row that the command line chooses."""
        columns: Sequence[str] = args.columns
        return columns

    def fill(self, description: str | None, execute: Execute, together: int = 1, **flags: tuple[Any, ...]) -> int:
        """Run the cells that the command line chooses, some rows at a time; return 1 if one is wrong.

        Each result is stored at once and shown on the page; a part of a matrix that another torch has filled is only
        printed.

        Args:
            description: What ``--help`` says.
            execute: Runs those of some cells that are not refused; yields cells and verdicts.
            together: The rows of these cells.
            flags: More options, as in :func:`benchmarks.script.options`.
        """
        resume = (False, "keep the cells that have been run, and were not wrong")
        args = self.options(description, resume=resume, **flags)
        before, failed = self.stored(), False
        is_kept = bool(before) or (len(args.rows) == len(self.rows) and len(args.columns) in (0, len(self.columns)))
        for first in range(0, len(args.rows), together):
            cells = [
                (row, column)
                for row in args.rows[first : first + together]
                for column in self.chosen(row, args)
                if not args.resume or before.get(row, {}).get(column, "wrong").startswith("wrong")
            ]
            for (row, column), verdict in _verdicts({cell: read(*self.words(*cell)) for cell in cells}, execute):
                failed |= verdict.startswith("wrong")
                self.report(row, column, verdict, is_kept=is_kept)
        return int(failed)

    def stored(self) -> dict[str, dict[str, str]]:
        """Return the stored verdicts by row and column; none if another torch has filled the matrix."""
        stored = json.loads((ROOT / self.result).read_text()) if (ROOT / self.result).exists() else {}
        return stored["cells"] if stored.get("torch") == torch.__version__ else {}

    def report(self, row: str, column: str, verdict: str, *, is_kept: bool = True) -> None:
        """Print the verdict on a cell; if it ``is_kept``, store it and show it on the page."""
        print(f"  {row:<24} {column:<20} {verdict}", flush=True)
        if is_kept:
            cells, page = self.stored(), ROOT / self.page
            cells.setdefault(row, {})[column] = verdict
            (ROOT / self.result).write_text(json.dumps({"torch": torch.__version__, "cells": cells}, indent=1) + "\n")
            page.write_text(self.shown(page.read_text()))


def _verdicts(cells: Cells, execute: Execute) -> Iterator[tuple[Cell, str]]:
    refusals = {cell: reason for cell, config in cells.items() if (reason := refusal(config))}
    yield from refusals.items()
    legal = {cell: config for cell, config in cells.items() if cell not in refusals}
    yield from execute(legal) if legal else ()


def refusal(config: Config) -> str | None:
    """Return the verdict on a cell that ptdbench refuses."""
    try:
        run_spec.specify(config, None)
    except ConfigError as error:
        return refused(error)
    return None


def refused(error: ConfigError) -> str:
    """Return the verdict that gives the reason of a refusal."""
    problem = error.problems[0]
    return f"refused: {problem.option}={str(problem.value).lower()}: {problem.rule}"
