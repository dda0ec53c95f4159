"""What several tests need: configurations composed as the command line does, and runs of them."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig

import ptdbench
from ptdbench import run as product
from ptdbench.launch import local
from ptdbench.records.load import Run
from ptdbench.setup.compose import compose_all
from tests import slurm_cluster

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]


def composed(*overrides: str) -> DictConfig:
    """One configuration, as ``python train.py OVERRIDES`` composes it."""
    return compose_all(ROOT / "conf", "config", overrides, multirun=False).jobs[0]


@pytest.fixture(scope="session", autouse=True)
def _preload() -> None:
    """Let the server that ranks are forked from import what they need, or each rank of each test would."""
    models = (f"ptdbench.models.{name}" for name in ("gpt", "resnet", "toy"))
    local.warm_up(["ptdbench.run", "ptdbench.workloads.train", "ptdbench.parallel.strategy", *models])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Record]:
    """Carry out a run through the product's own launcher and return its record."""
    count = 0

    def run_it(*overrides: str) -> Record:
        nonlocal count
        directory = tmp_path / str(count)
        directory.mkdir()
        count += 1
        product.run(composed(*overrides), directory)
        return record_of(directory)

    return run_it


def record_of(directory: Path) -> Record:
    """The record of a run, and its series as lists: ``None`` where a number is not known, empty where none is.

    ``rank_step_seconds`` are those of the run's last start, by rank.
    """
    found = ptdbench.load(directory)
    assert isinstance(found, Run)
    names = ("losses", "learning_rates", "gradient_norms", "wait_seconds", "memory_bytes")
    lists = {name: [None if math.isnan(value) else value for value in found.series(name).tolist()] for name in names}
    last = found["segments"][-1]["first_step"] if found.get("segments") else 0
    times = found.series("step_seconds")[last:]
    present = times[:, ~np.isnan(times).all(axis=0)].T.tolist()
    return {
        **found,
        **{name: values if any(value is not None for value in values) else [] for name, values in lists.items()},
        "rank_step_seconds": present,
    }


#: How the variables begin that launchers, schedulers and pytest leave to what they start.
_OF_LAUNCHERS = (
    "SLURM", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "OMPI_", "PMI", "MPI_", "MV2_", "JSM_",
    "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "OMP_",
    "HYDRA_", "PYTEST_",
)  # fmt: skip

#: The environment before any test changed it.
_ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}

#: Begins the reason of a test that was left out because the machine lacks something.
_LEFT_OUT = "left out: "


@pytest.fixture
def environ() -> dict[str, str]:
    """The environment of a person's fresh shell, for programs that a test starts: no launcher's, and not pytest's."""
    return dict(_ENVIRON)


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Path]:
    """The folder of the cluster that a person has up, or else of one that lives as long as this session."""
    try:
        slurm_cluster.install("slurm-wlm", "munge")
    except slurm_cluster.Unavailable as error:
        pytest.skip(f"{_LEFT_OUT}no SLURM: {error}")
    if slurm_cluster.works():
        yield slurm_cluster.FOLDER
        return
    folder = Path(tempfile.mkdtemp(prefix="ptdbench-slurm-", dir="/tmp"))  # sockets in it need a short path
    try:
        yield folder
    finally:
        slurm_cluster.down(folder)


@pytest.fixture
def slurm(_cluster: Path, environ: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment for programs that use the two nodes of the test cluster; the test's jobs end with it."""
    conf = slurm_cluster.up(_cluster)  # costs nothing where the test before left it in order
    key = f"pytest-{os.getpid()}"
    yield {**environ, "SLURM_CONF": str(conf), "SBATCH_WCKEY": key, "SLURM_WCKEY": key, "SALLOC_WCKEY": key}
    slurm_cluster.cancel(conf, key)


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """The words that start ranks through Open MPI here, also as root and for more ranks than cores."""
    try:
        slurm_cluster.install("openmpi-bin")
    except slurm_cluster.Unavailable as error:
        pytest.skip(f"{_LEFT_OUT}no Open MPI: {error}")
    return [str(shutil.which("mpirun")), *([] if os.geteuid() else ["--allow-run-as-root"]), "--oversubscribe"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses SLURM or Open MPI, so that ``-m "not slurm"`` never misses a test."""
    for fixture, mark in (("slurm", "slurm"), ("mpirun", "mpi")):
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(mark)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say last which tests were left out because this machine cannot have SLURM or Open MPI, and why."""
    yield
    left_out: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        _, found, reason = str(report.longrepr[2]).partition(_LEFT_OUT)
        if found:
            left_out[reason].append(report.nodeid)
    for reason, tests in left_out.items():
        what = reason.removeprefix("no ").partition(":")[0]
        terminalreporter.section(f"left out {len(tests)} test{'s' * (len(tests) > 1)}, for want of {what}")
        terminalreporter.line(reason)
        for test in tests:
            terminalreporter.line(f"  {test}")
