"""The jobs of a sweep that was submitted: ``jobs.json`` in its directory, for ``status`` to ask the queue about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ptdbench.records.store import Damaged, write_json

LEDGER = "jobs.json"


@dataclass(frozen=True)
class Job:
    """One run that was submitted.

    Attributes:
        number: Its number in the sweep.
        id: SLURM's name for it, ``123`` or ``123_0``.
        label: The run in a word or two.
        shape: Nodes and ranks, for people.
        overrides: What was typed for this run.
        directory: The run's directory, below the sweep's.
        log: Folder of the ranks' output.
    """

    number: int
    id: str
    label: str
    shape: str
    overrides: list[str]
    directory: str
    log: str


def write(sweep_directory: Path, jobs: Sequence[Job]) -> None:
    """Note down what was submitted."""
    write_json(sweep_directory / LEDGER, {"jobs": [asdict(job) for job in jobs]})


def read(sweep_directory: Path) -> list[Job]:
    """What was submitted; nothing where nothing was.

    Raises:
        Damaged: The file is not what was written.
    """
    path = sweep_directory / LEDGER
    if not path.exists():
        return []
    try:
        return [Job(**job) for job in json.loads(path.read_bytes())["jobs"]]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None
