r"""Tables of a report for a paper, in LaTeX with booktabs: ``\input{report}`` in a document."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ptdbench.comparison.alternatives import of_sweeps
from ptdbench.records.run_record import RunRecord
from ptdbench.report import columns
from ptdbench.report.columns import Column, Section
from ptdbench.report.text import MISSING
from ptdbench.terminal import plain

#: Characters with a meaning in LaTeX, and how to write them.
_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "·": r"$\cdot$",
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def latex(title: str, subtitle: str, runs: Sequence[RunRecord]) -> str:
    """Return a table for each model and global batch, whose caption has the answer; other workloads have none."""
    sections = columns.sections(of_sweeps([run for run in runs if run.model]))
    head = [f"% {plain(' '.join(line.split()))}" for line in (title, subtitle, r"\usepackage{booktabs}")]
    return "\n\n".join(["\n".join(head), *("\n".join(_table(section)) for section in sections)]) + "\n"


def _table(section: Section) -> Iterator[str]:
    """Yield the lines of a table; what is equal in all rows is in its caption."""
    cells = {column: [column.cell(row) for row in section.rows] for column in section.columns("paper")}
    alike = [column for column, texts in cells.items() if column.in_title and len({*texts}) == 1]
    shown = [column for column, texts in cells.items() if column not in alike and {*texts} != {MISSING}]
    title = section.title(column.in_title(cells[column][0]) for column in alike if column.in_title)
    caption = f"{title}. {section.answer}"
    yield r"\begin{table}"
    yield r"  \centering\footnotesize\setlength{\tabcolsep}{3pt}"
    yield rf"  \caption{{{_escaped(caption)}}}"
    yield rf"  \begin{{tabular}}{{{''.join('l' if column.is_text else 'r' for column in shown)}}}"
    yield r"    \toprule"
    yield _line(column.heading for column in shown)
    yield r"    \midrule"
    yield from (_line(_ranged(column, cells[column][place]) for column in shown) for place in range(len(section.rows)))
    yield r"    \bottomrule"
    yield r"  \end{tabular}"
    yield r"\end{table}"


def _line(cells: Iterable[str]) -> str:
    return rf"    {' & '.join(map(_escaped, cells))} \\"


def _escaped(line: str) -> str:
    """Return a text on one line, with all of LaTeX's marks escaped."""
    return "".join(_ESCAPES.get(letter, letter) for letter in plain(" ".join(line.split())))


def _ranged(column: Column, cell: str) -> str:
    """Return a cell with an en dash between figures; names keep their hyphens."""
    return cell if column.is_text else re.sub(r"(?<=\d)-(?=\d)", "--", cell)
