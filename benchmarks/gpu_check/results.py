"""What the parts found on each kind of device: one JSON file a device, and tables of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from ptdbench.files import write_json
from ptdbench.report import text

#: Where results are kept, in the repository.
FOLDER = Path(__file__).parents[1] / "gpu"


@dataclass(frozen=True)
class Check:
    """One thing that a part looked at."""

    name: str  #: What it is.
    passed: bool  #: Whether it is as it must be.
    said: str  #: The figure and the rule, for people.
    figures: Mapping[str, Any] = field(default_factory=dict)  #: What was measured, JSON.


@dataclass(frozen=True)
class Found:
    """What a part found."""

    taken: str  #: When, in UTC.
    seconds: float  #: How long it took.
    environment: Mapping[str, Any]  #: Hardware and versions, as in a record.
    checks: list[Check]  #: What it looked at, in order.


def keep(folder: Path, device: str, part: str, found: Found) -> None:
    """Write what a part found into the device's file, in place of what it found before; other parts stay."""
    path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):  # parts run beside each other
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"device": device, "parts": {}}
        known["parts"][part] = asdict(found)
        write_json(path, known)


def tables(folder: Path) -> str:
    """All that is on record, device by device."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return f"nothing is on record in {folder}: no part has run on a GPU yet"
    return "\n\n".join(_of_device(json.loads(path.read_text())) for path in files)


def _of_device(known: Mapping[str, Any]) -> str:
    checks = [(part, check) for part, found in known["parts"].items() for check in found["checks"]]
    rows = [(part, one["name"], "ok" if one["passed"] else "FAIL", one["said"]) for part, one in checks]
    shown = text.drawn(("part", "check", "", "figure"), rows, 120, words=("part", "check", "", "figure"))
    return f"{known['device']}\n{shown}"
