"""A report in GitHub-flavored Markdown, for pull requests and issues."""

import html
from collections.abc import Iterator, Sequence

from ptdbench.comparison.alternatives import of_sweeps
from ptdbench.records.run_record import RunRecord
from ptdbench.report import columns, table
from ptdbench.report.columns import Column, Row, Section
from ptdbench.report.labels import Environments
from ptdbench.terminal import plain

#: Width in columns of the output of other workloads.
_WIDTH = 110


def markdown(title: str, subtitle: str, runs: Sequence[RunRecord]) -> str:
    """Return the report of runs whose ``directory`` fields give their current location; it begins with its answers."""
    sections = columns.sections(of_sweeps([run for run in runs if run.model]))
    parts = [f"**{_escaped(line)}**" for line in columns.answers(sections)]
    parts += [f"# {_escaped(title)}", _escaped(subtitle)]
    parts += [part for section in sections for part in _of_model(section)]
    parts += [part for run in runs if not run.model for part in _of_workload(run)]
    for heading, fields in Environments(runs).described().items():
        parts.append(_folded(heading, ["\n".join(f"{name}: {text}" for name, text in fields.items())]))
    return plain("\n\n".join(parts)) + "\n"


def _of_model(section: Section) -> Iterator[str]:
    yield f"## {_escaped(section.title())}"
    yield _table(section.columns("file"), section.rows)
    if lines := [*section.remarks, *section.why]:
        yield "\n".join(f"- {_escaped(line)}" for line in lines)
    typed = [(row.name, row.run.rerun_command() or "the command is not on record") for row in section.rows]
    yield _folded("commands", [f"# {name}\n{command}" for name, command in typed])


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    rule = ["---" if column.is_text else "---:" for column in columns]
    cells = [[_escaped(column.cell(row)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [[column.heading for column in columns], rule, *cells])


def _of_workload(run: RunRecord) -> Iterator[str]:
    yield f"## {_escaped(run.workload)}"
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


def _escaped(text: str) -> str:
    """Return a text on one line, with Markdown and HTML markup escaped."""
    line = _without_mentions(" ".join(text.split()).replace("&", "&amp;"))
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|~$" else letter for letter in line)
