"""What tests that inject faults have in common: how they inject one, and the table of the faults on a page."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: Injects a fault while the context is open.
Inject = Callable[[], AbstractContextManager[Any]]

#: By what is broken: the fault, and where it matters, the layout first.
Faults = Mapping[str, tuple[Any, ...]]


def of(owner: Any, name: str, wrong: Any) -> Inject:
    return lambda: patch.object(owner, name, wrong)


def after(owner: Any, name: str, spoil: Callable[[Any], Any]) -> Inject:
    original = getattr(owner, name)
    return of(owner, name, lambda *arguments, **options: spoil(original(*arguments, **options)))


def is_on(page: str, faults: Faults) -> bool:
    """Whether a page of docs/ has the table of these faults; prints the table, to be copied, if it has not."""
    rows = [f"| {name} | {', '.join(where)} |" for name, (_, *where) in faults.items()]
    table = "\n".join(["| broken | detected under |", "|---|---|", *rows])
    is_listed = table in (Path(__file__).parents[2] / "docs" / page).read_text()
    if not is_listed:
        print(table)
    return is_listed
