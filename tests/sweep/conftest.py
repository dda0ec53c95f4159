"""Sweeps for the tests of this folder."""

from pathlib import Path

import pytest

from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import requests, status
from tests.sweep.made import Directory


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directory:
    """The directory of a sweep, with a queue of its own that answers at once."""
    directory = Directory(tmp_path / "sweep")
    monkeypatch.setattr(slurm, "queue", directory.ask)
    monkeypatch.setattr(slurm, "named", directory.ask_by_name)
    monkeypatch.setattr(status, "GRACE", 0.0)
    return directory


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "clusters", lambda: ["here"])
    monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, 4, 60, (0,), 4)])

    def make(*overrides):
        found = compose_all(["cluster=slurm", "model=toy", *overrides], multirun=True)
        return requests.of_cluster(found)

    return make
