"""The tables of ``docs/record.md``, which ``conf.py`` puts there.

The source is the types in :mod:`ptdbench.records.schema` and :mod:`ptdbench.measure.results`, each of whose fields is
described by the comment beside or above it.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct

from ptdbench.measure.results import Findings
from ptdbench.parallel.dims import Dims
from ptdbench.records import load
from ptdbench.records.schema import OfDegrees, Record


class Field(NamedTuple):
    """A field of a record or of a nested type, with its declared type and its description."""

    name: str
    kind: str
    text: str


def markdown() -> str:
    """The sections of the page."""
    top, nested = (Record, Findings), parts(Record, Findings)[2:]
    sections = [*(_section(kind, level=2) for kind in top), *(_section(kind, level=3) for kind in nested)]
    return "\n".join([_series(), *sections])


@cache
def fields(kind: type[Struct]) -> dict[str, Field]:
    """The fields of a type in order, those of its bases first; each has a description."""
    if kind is OfDegrees:
        return {name: Field(name, "Degree | None", row.text) for name, row in Dims.rows().items()}
    found: dict[str, Field] = {}
    for base in kind.__bases__:
        found |= fields(base) if base not in (Struct, object) else {}
    (body,) = (
        one.body for one in _source(kind.__module__).body if isinstance(one, ast.ClassDef) and one.name == kind.__name__
    )
    lines = [line.strip() for line in inspect.getsource(sys.modules[kind.__module__]).splitlines()]
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            above = takewhile(lambda line: line.startswith("#: "), reversed(lines[: statement.lineno - 1]))
            text = lines[statement.lineno - 1].partition("  #: ")[2] or " ".join(line[3:] for line in [*above][::-1])
            if not text:
                raise TypeError(f"{kind.__name__}.{name} has no description beside or above it")
            found[name] = Field(name, ast.unparse(statement.annotation), text)
    return found


@cache
def _source(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


@cache
def parts(*kinds: type[Struct]) -> tuple[type[Struct], ...]:
    """These types and the types nested in them, each once, in the order of their first mention."""
    found = list(kinds)
    for kind in found:  # grows meanwhile
        for field in msgspec.structs.fields(kind):
            found += [one for one in _nested(field.type) if one not in found]
    return tuple(found)


def _nested(kind: Any) -> Iterator[type[Struct]]:
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind
    for one in get_args(kind):
        yield from _nested(one)


def _section(kind: type[Struct], level: int) -> str:
    rows = [f"| `{field.name}` | {_linked(field.kind)} | {_plain(field.text)} |" for field in fields(kind).values()]
    table = ["| field | type | what it holds |", "|---|---|---|", *rows]
    return "\n".join([f"{'#' * level} {kind.__name__}", "", _plain(inspect.getdoc(kind) or ""), "", *table, ""])


def _series() -> str:
    """The series, as :meth:`ptdbench.records.load.Run.series` describes them."""
    text = inspect.getdoc(load.Run.series) or ""
    listed = re.findall(r"^ +- (``.*?[;.])$", text, re.MULTILINE)
    assert len(listed) == len(load.SERIES)
    first = text.partition("\n")[0]
    return "\n".join(
        [
            "## Series",
            "",
            f"`run.series(name)`: {first[0].lower()}{first[1:]}",
            "",
            *(f"- {_plain(one)}" for one in listed),
            "",
        ]
    )


def _linked(kind: str) -> str:
    """``list[Segment] | None`` with a link to the section."""
    shown = kind.replace("|", "or").replace("None", "null")
    for limited, plain in {"Whole|Count|Degree": "int", "Amount|Quantity|Positive": "float"}.items():
        shown = re.sub(rf"\b({limited})\b", plain, shown)
    names = {one.__name__ for one in parts(Record, Findings)}
    return re.sub(
        r"\b[A-Z]\w+\b", lambda name: f"[{name[0]}](#{name[0].lower()})" if name[0] in names else name[0], shown
    )


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())
