from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ptdbench.setup.signature import problems


def told(target, options, given=()):
    return [str(problem) for problem in problems(target, options, given)]


def accepts(annotation: Any, value: Any) -> bool:
    def target(option):
        raise AssertionError("a check does not call what it checks")

    target.__annotations__ = {"option": annotation}
    return not problems(target, {"option": value})


@pytest.mark.parametrize(("annotation", "good", "bad"), [
    (int, [0, -3], [1.0, "1", True, None, [1]]),
    (float, [1, 1.5, 1e-3], ["1e-3", True, None]),
    (bool, [True, False], [0, 1, "true", None]),
    (str, ["", "text"], [1, None, True]),
    (Literal["fp32", "bf16"], ["fp32"], ["fp8", "FP32", None, 32]),
    (Literal[1, 2], [1, 2], [True, "1", 3]),
    (int | Literal["auto"], [1, "auto"], ["Auto", 1.5, None]),
    (float | None, [None, 1, 0.5], ["null", "abc"]),
    (list[int], [[1, 2], []], [1, "1,2", {"a": 1}, [1, "2"], [True]]),
    (tuple[float, float], [[0.9, 0.95]], [0.9, None]),
    (Sequence[str], [["a"]], ["a", 3, ["a", 3.1], [False], [None]]),
    (str | list[str], ["a", ["a"]], [1, [1]]),
    (float | torch.Tensor, [1e-3, 1], ["abc", None, True]),
    (Any, [1, "x", None, [1]], []),
    (Path | None, ["as it is converted inside", 1, None], []),
    (torch.dtype | str, ["fp32", 3], []),
])  # fmt: skip
def test_types(annotation, good, bad):
    assert [value for value in good if not accepts(annotation, value)] == []
    assert [value for value in bad if accepts(annotation, value)] == []


def function(*, size: int, rate: float = 0.1, mode: Literal["fast", "slow"] = "fast") -> None:
    raise AssertionError("a check does not call what it checks")


class Class:
    def __init__(self, params: list, *, size: int) -> None:
        raise AssertionError("a check does not call what it checks")


def test_everything_is_told_at_once():
    assert told(function, {"rate": "high", "mode": "quick", "sise": 3}) == [
        "rate=high: must be a number", "mode=quick: must be fast or slow",
        "sise=3: there is no such option; try size", "size=(not set): must be given",
    ]  # fmt: skip


def test_constructors_are_judged_by_what_can_be_seen_of_them():
    assert told(Class, {"size": "big"}) == ["size=big: must be a whole number", "params=(not set): must be given"]
    assert told(Class, {"size": 1, "param": 1}, given=["params"]) == ["param=1: there is no such option"]

    def anything(**options: int) -> None: ...

    def unreadable(size: NoSuchName) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert told(unreadable, {"size": object()}) == []
    assert told(unreadable, {"sise": 1})[0].startswith("sise=1: there is no such option")
    assert told(anything, {"whatever": 1}) == told(collections.OrderedDict, {"a": 1}) == []
    sound = {"lr": 1e-3, "betas": [0.9, 0.95], "fused": True}
    assert told(torch.optim.AdamW, sound, given=["params"]) == []
    assert told(torch.optim.AdamW, {"lr": "1e-3"}, given=["params"]) == ["lr=1e-3: must be a number"]
