"""What tests that put mistakes into the program have in common: how they do it, and the table of them on a page."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: Puts a mistake into the program for as long as the context is open.
Make = Callable[[], AbstractContextManager[Any]]

#: By what is wrong: the mistake, and in what it matters, the layout first.
Mistakes = Mapping[str, tuple[Any, ...]]


def of(owner: Any, name: str, wrong: Any) -> Make:
    return lambda: patch.object(owner, name, wrong)


def after(owner: Any, name: str, spoil: Callable[[Any], Any]) -> Make:
    original = getattr(owner, name)
    return of(owner, name, lambda *arguments, **options: spoil(original(*arguments, **options)))


def is_on(page: str, mistakes: Mistakes) -> bool:
    """Whether a page of docs/ has the table of these mistakes; prints the table, to be copied, if it has not."""
    rows = [f"| {name} | {', '.join(where)} |" for name, (_, *where) in mistakes.items()]
    table = "\n".join(["| mistake | seen under |", "|---|---|", *rows])
    is_listed = table in (Path(__file__).parents[2] / "docs" / page).read_text()
    if not is_listed:
        print(table)
    return is_listed
