"""Schedules that split the backward pass, which ptdbench refuses with the oldest torch that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch

from ptdbench.parallel.pipeline.schedules import SPLITS_SINCE

T = TypeVar("T")

SPLITS = torch.__version__ >= SPLITS_SINCE

needs_splitting = pytest.mark.skipif(not SPLITS, reason=f"needs torch {SPLITS_SINCE}, which splits backward passes")


def where_split(cases: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """These cases of a table, made, where this torch can carry them out; else none."""
    return {name: make() for name, make in cases.items()} if SPLITS else {}
