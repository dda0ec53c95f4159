"""The description of a record for people: ``python -m ptdbench.records.describe > docs/record.md``.

It is made of the types in :mod:`ptdbench.records.schema` and :mod:`ptdbench.records.findings`, whose fields are each
described by the text below them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from ptdbench.records import findings, load, schema, series
from ptdbench.records.findings import Findings
from ptdbench.records.schema import Record

_OPENING = f"""# The record

<!-- Made by `python -m ptdbench.records.describe`; the texts stand in ptdbench/records/schema.py and findings.py. -->

Every run leaves a `record.json` in its directory, failed runs too; a sweep gathers the records of its runs in
`results.jsonl`, a line each. Both are strict JSON: what is not finite is null. The numbers of every step lie beside the
record in `{series.NAME}`. Programs and notebooks read all of it through `ptdbench.load`, which imports no torch:

```python
import ptdbench

run = ptdbench.load("outputs/my_run")  # a run's directory: one record
run["metrics"]["tokens_per_second"]
run.series("losses")  # NumPy, a number for each step

for run in ptdbench.load("outputs/my_sweep"):  # a sweep, a folder of them, or a results.jsonl: a list
    print(run["parallel"], run["status"], run["final_loss"])
```
"""


class Field(NamedTuple):
    """A field of a record or of one of its parts.

    Attributes:
        name: Its name.
        kind: Its type, as it is declared.
        text: What it holds.
    """

    name: str
    kind: str
    text: str


def markdown() -> str:
    """The whole description."""
    parts = [_OPENING, _series(), _section(Record, level=2), _section(Findings, level=2)]
    parts += [_section(kind, level=3) for kind in _parts()]
    return "\n".join(parts)


@cache
def fields(kind: type) -> dict[str, Field]:
    """The fields of a TypedDict in their order, those of its bases first; each has a text."""
    found: dict[str, Field] = {}
    for base in filter(None, (_kind(ast.unparse(name)) for name in _classes()[kind.__name__].bases)):
        found |= fields(base)
    body = _classes()[kind.__name__].body
    for statement, text in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
                raise TypeError(f"{kind.__name__}.{name} has no description below it")
            found[name] = Field(name, ast.unparse(statement.annotation), inspect.cleandoc(str(text.value.value)))
    return found


@cache
def _classes() -> dict[str, ast.ClassDef]:
    trees = (ast.parse(inspect.getsource(module)) for module in (schema, findings))
    return {one.name: one for tree in trees for one in tree.body if isinstance(one, ast.ClassDef)}


def _kind(name: str) -> type | None:
    """The TypedDict of that name."""
    found: Any = getattr(schema, name, None) or getattr(findings, name, None)
    return found if hasattr(found, "__required_keys__") else None


def _parts() -> Iterator[type]:
    """The types of the record's parts, in the order in which they are first mentioned."""
    waiting, seen = [Record, Findings], set()
    while waiting:
        for field in fields(waiting.pop(0)).values():
            for name in re.findall(r"\w+", field.kind):
                kind = _kind(name)
                if kind and kind not in seen:
                    seen.add(kind)
                    waiting.append(kind)
                    yield kind


def _section(kind: type, level: int) -> str:
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
    return re.sub(
        r"\b[A-Z]\w+\b", lambda name: f"[{name[0]}](#{name[0].lower()})" if name[0] in _classes() else name[0], shown
    )


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    print(markdown(), end="")
