"""Matrices of runs: a cell is a layout, which is its row, with the levers of its column."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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

#: The cells of a row by their columns.
Cells = Mapping[str, Config]


@dataclass(frozen=True)
class Matrix:
    """A matrix of runs, of ``matrices.yaml``.

    What is said of a cell is ``ok`` with a figure, ``no effect``, ``refused:`` with the reason, or ``wrong:``.
    """

    common: str  #: The options that all cells share.
    rows: Mapping[str, tuple[int, str]]  #: The layouts: ranks and options.
    columns: Mapping[str, str]  #: The levers: options.
    page: str = ""  #: The page that shows the result.
    result: str = ""  #: The file of the result, JSON.
    head: str = ""  #: What stands above it: ``{ok}`` of ``{run}`` cells, ``{all}`` in all, with ``{torch}``.
    #: On virtual GPUs, the columns in which all ranks are carried out, not the first and the last one of a pipeline.
    all_ranks: Sequence[str] | None = None
    turns: Sequence[str] = ()  #: Of the zoo, columns of which a row has one by default, by turn.
    sizes: Mapping[str, int] = field(default_factory=dict)  #: Of the zoo's models of transformers, as far as they fit.

    @classmethod
    def load(cls: type[M], name: str) -> M:
        """Read one."""
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

        def shown(said: str) -> str:
            is_short = said.startswith(("ok", "no"))  # no effect, not run
            return said if is_short else f"({numbers.setdefault(said, len(numbers) + 1)})"

        columns = [column for column in self.columns if any(column in row for row in cells.values())]
        present = [row for row in self.rows if row in cells]
        rows = [[row, *(shown(cells[row].get(column, "not run")) for column in columns)] for row in present]
        every = [said for row in cells.values() for said in row.values()]
        count = {"run": len(every), "ok": sum(said.startswith("ok") for said in every)}
        head = self.head.format(**count, all=len(self.rows) * len(self.columns), torch=stored["torch"])
        reasons = [f"{number}. {said}" for said, number in numbers.items()]
        layouts = [f"- *{row}*: `{self.rows[row][1]}`, {self.rows[row][0]} ranks" for row in present]
        levers = [f"- *{column}*: `{self.columns[column] or 'no other option'}`" for column in columns]
        legend = "Rows and columns are these options:"
        table = tables.drawn(["", *columns], rows)
        return "\n".join([head, "", table, "", *reasons, "", legend, "", *layouts, *levers])

    def fill(self, description: str | None, carry_out: Callable[[str, Cells], Iterable[tuple[str, str]]]) -> int:
        """Carry out the cells that the command line chooses, row by row; 1 if one is wrong.

        Each result is stored at once and shown on the page; a part of a matrix that another torch has filled is only
        printed.

        Args:
            description: What ``--help`` says.
            carry_out: Gets a row and its cells that are not refused, and tells of each column what came of it.
        """
        rows, columns = (*self.rows,), (*self.columns,)
        given = options(
            description,
            rows=(rows, "some of them", rows),
            columns=(columns, "some of them", columns),
            resume=(False, "keep the cells that have been run, and were not wrong"),
        )
        known, failed = self.stored(), False
        is_kept = bool(known) or (*given.rows, *given.columns) == (*rows, *columns)
        for row in given.rows:
            done = [name for name, said in known.get(row, {}).items() if given.resume and not said.startswith("wrong")]
            todo = [name for name in given.columns if name not in done]
            for column, said in self._row(row, todo, carry_out):
                failed |= said.startswith("wrong")
                self.tell(row, column, said, is_kept=is_kept)
        return int(failed)

    def stored(self) -> dict[str, dict[str, str]]:
        """Return what cells of this torch have been found to be, by row and column."""
        stored = json.loads((ROOT / self.result).read_text()) if (ROOT / self.result).exists() else {}
        return stored["cells"] if stored.get("torch") == torch.__version__ else {}

    def tell(self, row: str, column: str, said: str, *, is_kept: bool = True) -> None:
        """Print what is said of a cell; if it ``is_kept``, store it and show it on the page."""
        print(f"  {row:<24} {column:<20} {said}", flush=True)
        if is_kept:
            cells, page = self.stored(), ROOT / self.page
            cells.setdefault(row, {})[column] = said
            (ROOT / self.result).write_text(json.dumps({"torch": torch.__version__, "cells": cells}, indent=1) + "\n")
            page.write_text(self.shown(page.read_text()))

    def _row(
        self, row: str, columns: Sequence[str], carry_out: Callable[[str, Cells], Iterable[tuple[str, str]]]
    ) -> Iterator[tuple[str, str]]:
        cells = {column: read(*self.words(row, column)) for column in columns}
        for column, reason in {column: refusal(config) for column, config in cells.items()}.items():
            if reason:
                del cells[column]
                yield column, reason
        yield from carry_out(row, cells) if cells else ()


def refusal(config: Config) -> str | None:
    """Return what is said of a cell that ptdbench refuses."""
    try:
        run_spec.specify(config, None)
    except ConfigError as error:
        return refused(error)
    return None


def refused(error: ConfigError) -> str:
    """Say that a cell is refused, and why."""
    problem = error.problems[0]
    return f"refused: {problem.option}={str(problem.value).lower()}: {problem.rule}"
