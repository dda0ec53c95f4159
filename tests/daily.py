"""Products of which ``make test`` tries some cases, and ``make test-all`` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(names: str | tuple[str, ...], values: Iterable[Any], daily: Collection[Any], **options: Any) -> Any:
    """``pytest.mark.parametrize(names, values)`` with all but the ``daily`` values marked thorough.

    A value that is a ``pytest.param`` is named by its id.
    """
    values = list(values)
    keys = [getattr(value, "id", value) for value in values]
    assert all(key in keys for key in daily), f"{daily} is not among {keys}"
    marked = [value if key in daily else _thorough(names, value) for key, value in zip(keys, values, strict=True)]
    return pytest.mark.parametrize(names, marked, **options)


def _thorough(names: str | tuple[str, ...], value: Any) -> Any:
    mark = pytest.mark.thorough
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*([value] if isinstance(names, str) else value), marks=mark)


def selected(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """The values of parameter ``name`` in the selected tests of a module that use a fixture, which serves them all."""
    params = (
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
        if request.fixturename in item.fixturenames
    )
    return {values[name] for values in params if name in values}
