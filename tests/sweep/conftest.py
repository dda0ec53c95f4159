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
    """The runs of a command line, as a launcher gets them, with the same short names whatever is swept."""
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "clusters", lambda: ["here"])
    monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, (0,))])

    def make(*overrides):
        names = "hydra.sweep.subdir='${hydra.job.num}_${workload.label}'"
        found = compose_all(["cluster=slurm", "model=toy", names, *overrides], multirun=True)
        return requests.of_cluster(found)

    return make
