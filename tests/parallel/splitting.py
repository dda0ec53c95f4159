"""Schedules that split the backward pass, which ptdbench refuses with a torch that does not do it right."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

from ptdbench.parallel.pipeline_schedules import SCHEDULES, SPLITS_SINCE

T = TypeVar("T")

REFUSED = [name for name, schedule in SCHEDULES.items() if not schedule.is_supported]
SPLITS = not REFUSED

needs_splitting = pytest.mark.skipif(not SPLITS, reason=f"needs torch {SPLITS_SINCE}, which splits backward passes")


def where_split(cases: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """These cases of a table, made, where this torch can carry them out; else none."""
    return {name: make() for name, make in cases.items()} if SPLITS else {}


def is_refused(command: str) -> bool:
    """Whether a command names a schedule that this torch cannot carry out."""
    return any(name in command for name in REFUSED)
