"""Sweeps for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptdbench.launch import slurm
from ptdbench.sweep import status
from tests.sweep.made import Directory


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directory:
    """The directory of a sweep, with a queue of its own that answers at once."""
    directory = Directory(tmp_path / "sweep")
    monkeypatch.setattr(slurm, "queue", directory.ask)
    monkeypatch.setattr(slurm, "named", directory.ask_by_name)
    monkeypatch.setattr(status, "GRACE", 0.0)
    return directory
