r"""A report in GitHub-flavored Markdown, for pull requests and issues, and its tables in LaTeX, for papers.

The tables use booktabs: ``\input{report}`` in a document.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from ptdbench.comparison.ranking import of_sweeps
from ptdbench.records.run_record import RunRecord
from ptdbench.report import columns, table
from ptdbench.report.columns import Column, Section
from ptdbench.report.labels import Environments
from ptdbench.report.text import MISSING
from ptdbench.terminal import plain

#: Width in columns of the output of other workloads.
_WIDTH = 110


def markdown(title: str, subtitle: str, runs: Sequence[RunRecord]) -> str:
    """Return the report of runs whose ``directory`` fields give their current location; it begins with its answers."""
    sections = _sections(runs)
    parts = [f"**{_in_markdown(line)}**" for line in columns.answers(sections)]
    parts += [f"# {_in_markdown(title)}", _in_markdown(subtitle)]
    parts += [part for section in sections for part in _of_model(section)]
    parts += [part for run in runs if not run.model for part in _of_workload(run)]
    for heading, fields in Environments(runs).described().items():
        parts.append(_folded(heading, ["\n".join(f"{name}: {text}" for name, text in fields.items())]))
    return plain("\n\n".join(parts)) + "\n"


def _sections(runs: Sequence[RunRecord]) -> list[Section]:
    return columns.sections(of_sweeps([run for run in runs if run.model]))


def _of_model(section: Section) -> Iterator[str]:
    yield f"## {_in_markdown(section.title())}"
    shown = section.columns("file")
    rule = ["---" if column.is_text else "---:" for column in shown]
    cells = [[_in_markdown(column.cell(row)) for column in shown] for row in section.rows]
    yield "\n".join(f"| {' | '.join(line)} |" for line in [[column.heading for column in shown], rule, *cells])
    if lines := [*section.remarks, *section.why]:
        yield "\n".join(f"- {_in_markdown(line)}" for line in lines)
    typed = [(row.name, row.run.rerun_command() or "the command is not on record") for row in section.rows]
    yield _folded("commands", [f"# {name}\n{command}" for name, command in typed])


def _of_workload(run: RunRecord) -> Iterator[str]:
    yield f"## {_in_markdown(run.workload)}"
    yield _fenced(table.of_workload(run, _WIDTH))
    if typed := run.rerun_command():
        yield _folded("command", [typed])


def _folded(title: str, texts: Sequence[str]) -> str:
    body = _fenced("\n\n".join(texts))
    summary = _without_mentions(html.escape(" ".join(title.split()), quote=False))  # HTML, not Markdown
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def _fenced(text: str) -> str:
    """Return a text verbatim, in a fence longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def _without_mentions(text: str) -> str:
    """Escape ``@``, with which GitHub would notify a user."""
    return text.replace("@", "&#64;")


def _in_markdown(text: str) -> str:
    """Return a text on one line, with Markdown and HTML markup escaped."""
    line = _without_mentions(" ".join(text.split()).replace("&", "&amp;"))
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|~$" else letter for letter in line)


#: Characters with a meaning in LaTeX, and how to write them.
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "·": r"$\cdot$",
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def latex(title: str, subtitle: str, runs: Sequence[RunRecord]) -> str:
    """Return a table for each model and global batch, whose caption has the answer; other workloads have none."""
    head = [f"% {plain(' '.join(line.split()))}" for line in (title, subtitle, r"\usepackage{booktabs}")]
    tables = ["\n".join(_latex_table(section)) for section in _sections(runs)]
    return "\n\n".join(["\n".join(head), *tables]) + "\n"


def _latex_table(section: Section) -> Iterator[str]:
    """Yield the lines of a table; what is equal in all rows is in its caption."""
    cells = {column: [column.cell(row) for row in section.rows] for column in section.columns("paper")}
    alike = [column for column, texts in cells.items() if column.in_title and len({*texts}) == 1]
    shown = [column for column, texts in cells.items() if column not in alike and {*texts} != {MISSING}]
    title = section.title(column.in_title(cells[column][0]) for column in alike if column.in_title)
    caption = f"{title}. {section.answer}"
    yield r"\begin{table}"
    yield r"  \centering\footnotesize\setlength{\tabcolsep}{3pt}"
    yield rf"  \caption{{{_in_latex(caption)}}}"
    yield rf"  \begin{{tabular}}{{{''.join('l' if column.is_text else 'r' for column in shown)}}}"
    yield r"    \toprule"
    yield _latex_row(column.heading for column in shown)
    yield r"    \midrule"
    for place in range(len(section.rows)):
        yield _latex_row(_ranged(column, cells[column][place]) for column in shown)
    yield r"    \bottomrule"
    yield r"  \end{tabular}"
    yield r"\end{table}"


def _latex_row(cells: Iterable[str]) -> str:
    return rf"    {' & '.join(map(_in_latex, cells))} \\"


def _in_latex(line: str) -> str:
    """Return a text on one line, with all of LaTeX's marks escaped."""
    return "".join(_LATEX_ESCAPES.get(letter, letter) for letter in plain(" ".join(line.split())))


def _ranged(column: Column, cell: str) -> str:
    """Return a cell with an en dash between figures; names keep their hyphens."""
    return cell if column.is_text else re.sub(r"(?<=\d)-(?=\d)", "--", cell)
