"""The environments of a report's runs: each once, and what tells it from the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ptdbench.records.bearing import leaves
from ptdbench.records.schema import Written

#: What is always named, with a word before it where the value alone says too little.
_HEAD = {"host": "", "cpu": "", "torch": "torch ", "ptdbench": "ptdbench "}


class Environments:
    """Each environment once, in the order of the runs.

    Attributes:
        found: The environments, as records have them.
    """

    def __init__(self, runs: Iterable[Written]) -> None:
        self.found: list[Mapping[str, Any]] = []
        self._numbers: dict[str, int] = {}
        for run in runs:
            if environment := run.get("environment"):
                text = _text(environment)
                if text not in self._numbers:
                    self._numbers[text] = len(self.found)
                    self.found.append(environment)

    def number(self, run: Written) -> int | None:
        """The place of a run's environment among all; ``None`` where it is not on record."""
        environment = run.get("environment")
        return self._numbers[_text(environment)] if environment else None

    def titles(self) -> list[str]:
        """A line for each environment: machine and versions, and whatever else differs."""
        known = [
            {
                name.removeprefix("settings."): value if isinstance(value, str) else json.dumps(value)
                for name, value in leaves(environment)
                if value not in (None, {})
            }
            for environment in self.found
        ]
        names = dict.fromkeys(name for one in known for name in one if name not in _HEAD)
        differing = [name for name in names if len({one.get(name) for one in known}) > 1]
        return [
            ", ".join(
                [
                    *(f"{word}{one[name]}" for name, word in _HEAD.items() if name in one),
                    *(f"{name} {one.get(name, 'unknown')}" for name in differing),
                ]
            )
            for one in known
        ]


def _text(environment: Mapping[str, Any]) -> str:
    return json.dumps(environment, sort_keys=True)
