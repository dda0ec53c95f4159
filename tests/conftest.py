"""What several tests need: configurations composed as the command line does, and runs of them."""

import compileall
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from omegaconf import DictConfig, open_dict

import ptdbench
from ptdbench import entry
from ptdbench.launch import local, settings
from ptdbench.records.load import Run
from ptdbench.setup import config
from ptdbench.setup.compose import compose_all
from ptdbench.setup.config import Config
from tests import slurm_cluster
from tests.shared_ranks import RANKS, carry_out

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]


def composed(*overrides: str) -> DictConfig:
    """One configuration, as ``python train.py OVERRIDES`` composes it."""
    (job,) = compose_all(overrides).wholes
    with open_dict(job):
        del job["hydra"]
    return job


def read(*overrides: str) -> Config:
    """The same, checked."""
    return config.read(composed(*overrides))


@pytest.fixture(scope="session", autouse=True)
def _preload(request: pytest.FixtureRequest) -> None:
    """Let the server that ranks are forked from import what they need, or each rank of each test would."""
    if not any(item.get_closest_marker("ranks") for item in request.session.items):
        return
    models = [f"ptdbench.models.{name}" for name in ("gpt", "llama", "resnet", "toy")]
    if any("hf_" in item.nodeid for item in request.session.items):
        models += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")]
    chosen = ("ptdbench.workloads.train", "ptdbench.parallel.strategy", *models)
    local.warm_up(["ptdbench.rank_imports", *chosen, *entry.EVENT_FILES, "pytest"])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Record]:
    """Carry out a run through the product's own launcher, with the defaults, and return its record.

    What is tested of faults is tested so: the profiling pass after the last step is where ranks may part, too.
    """
    count = 0

    def run_it(*overrides: str) -> Record:
        nonlocal count
        directory = tmp_path / str(count)
        directory.mkdir()
        count += 1
        carry_out(composed(*overrides), directory)
        return record_of(directory)

    return run_it


def outputs(folder: Path) -> list[Path]:
    """The runs and sweeps that commands have left in a folder, without the link to the newest."""
    return [path for path in (folder / "outputs").iterdir() if not path.is_symlink()]


def records(folder: Path) -> list[Record]:
    """The records of the runs that commands have left in a folder, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((folder / "outputs").glob("**/record.json"))]


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


@pytest.fixture(scope="module", autouse=True)
def _end_of_shared_ranks() -> Iterator[None]:
    yield
    RANKS.end()


def run_on_shared_ranks(directory: Path, *overrides: str) -> Record:
    """The record of a run in ranks that the tests of a module share, so that none have to be started for it.

    Without the profiling pass, unless it is about that: most tests are about what comes before.
    """
    directory.mkdir(exist_ok=True)
    if (directory / "record.json").exists():
        RANKS.end()  # one group of ranks does each run once: its addresses stay in their store
    asked = any(override.startswith("profile") for override in overrides)
    RANKS.run(composed(*overrides, *([] if asked else ["profile.steps=0"])), directory)
    return record_of(directory)


@pytest.fixture
def shared_run(tmp_path: Path) -> Callable[..., Record]:
    """As ``run``, for what a run comes to, and not how it starts and fails; see :func:`run_on_shared_ranks`."""
    count = itertools.count()
    return lambda *overrides: run_on_shared_ranks(tmp_path / f"shared-{next(count)}", *overrides)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank of a gloo group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


#: How the variables begin that launchers, schedulers and pytest leave to what they start.
_OF_LAUNCHERS = (
    "SLURM", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "OMPI_", "PMI", "MPI_",
    "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "OMP_",
    "HYDRA_", "PYTEST_",
)  # fmt: skip

#: The environment before any test changed it.
_ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}

#: The same, where a program may use this machine's GPUs.
ENVIRON_WITH_GPUS = dict(_ENVIRON)


def pytest_configure(config: pytest.Config) -> None:
    """Give tests a user cache of their own: a ceiling that a test has measured is not a figure for people.

    And compile the package once, also where Python is told not to: each process that a test starts would do it again.
    And keep the tests as pytest rewrites them, until all are collected: each worker would do it again.
    And hide GPUs, so that tests come to the same on every machine; ``pytest -m gpu`` runs those that need one.
    """
    runs_tests = config.getoption("dist", "no") == "no"  # and does not only start workers, which shall hide them
    if runs_tests and config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = _ENVIRON["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):  # not once more in each worker
        compileall.compile_dir(Path(ptdbench.__file__).parent, quiet=2)
    sys.dont_write_bytecode = False
    _parse_options_once()
    # A worker's lies in that of the process that starts it, which removes both: workers may be ended before they do.
    parent = os.environ["XDG_CACHE_HOME"] if hasattr(config, "workerinput") else None
    folder = tempfile.mkdtemp(prefix="ptdbench-cache-", dir=parent)
    os.environ["XDG_CACHE_HOME"] = folder
    if parent:  # one of them compiles the library of virtual GPUs for all
        library = Path(parent, "ptdbench", "virtual")
        library.mkdir(parents=True, exist_ok=True)
        Path(folder, "ptdbench").mkdir()
        Path(folder, "ptdbench", "virtual").symlink_to(library)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)


def _parse_options_once() -> None:
    """Parse the same text of a YAML file once in this process: composing a configuration takes a quarter less."""
    parse, parsed = yaml.load, dict[str, Any]()

    def load(stream: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader" or not hasattr(stream, "seek"):
            return parse(stream, Loader)
        text = stream.read()
        stream.seek(0)
        if text not in parsed:
            parsed[text] = parse(stream, Loader)
        return parsed[text]  # OmegaConf copies it

    yaml.load = load


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores, as tests mostly wait; each needs some 3 GiB with its ranks."""
    by_memory = psutil.virtual_memory().available // (3 << 30)
    return max(1, min(len(settings.own_cores()) + 1, by_memory))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ptdbench's folder in a user cache of one test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ptdbench"


@pytest.fixture(scope="session")
def environ() -> dict[str, str]:
    """The environment of a person's fresh shell, for programs that a test starts: no launcher's, and not pytest's."""
    return {**_ENVIRON, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}


def _need(what: str, *packages: str) -> None:
    try:
        slurm_cluster.install(*packages)
    except slurm_cluster.Unavailable as error:
        pytest.skip(f"no {what}: {error}")


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Path]:
    """The folder of the cluster that a person has up, or else of one that lives as long as this session."""
    _need("SLURM", "slurm-wlm", "munge")
    if slurm_cluster.works():
        yield slurm_cluster.FOLDER
        return
    folder = Path(tempfile.mkdtemp(prefix="ptdbench-slurm-", dir="/tmp"))  # sockets in it need a short path
    try:
        yield folder
    finally:
        slurm_cluster.down(folder)


@pytest.fixture
def slurm(_cluster: Path) -> Iterator[dict[str, str]]:
    """The environment for programs that use the two nodes of the test cluster; the test's jobs end with it."""
    with _slurm(_cluster, f"pytest-{os.getpid()}") as environ:
        yield environ


@pytest.fixture(scope="module")
def slurm_of_module(_cluster: Path) -> Iterator[dict[str, str]]:
    """The same for jobs that several tests of a module look at."""
    with _slurm(_cluster, f"pytest-{os.getpid()}-module") as environ:
        yield environ


@contextmanager
def _slurm(folder: Path, key: str) -> Iterator[dict[str, str]]:
    conf = slurm_cluster.up(folder)  # costs nothing where the test before left it in order
    yield {**_ENVIRON, "SLURM_CONF": str(conf), "SBATCH_WCKEY": key, "SLURM_WCKEY": key, "SALLOC_WCKEY": key}
    slurm_cluster.cancel(conf, key)


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """The words that start ranks through Open MPI here, also as root and for more ranks than cores."""
    _need("Open MPI", "openmpi-bin")
    return [str(shutil.which("mpirun")), *([] if os.geteuid() else ["--allow-run-as-root"]), "--oversubscribe"]


@pytest.fixture(scope="session")
def chromium() -> str:
    _need("Chromium", "chromium")
    return str(shutil.which("chromium"))


#: The mark of a test that uses a fixture.
_MARKS = {"slurm": "slurm", "slurm_of_module": "slurm", "mpirun": "mpi", "run": "ranks", "shared_run": "ranks"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses SLURM, Open MPI or ranks, so that ``-m "not slurm"`` never misses a test."""
    for fixture in _MARKS.keys() & set(getattr(item, "fixturenames", ())):
        item.add_marker(_MARKS[fixture])
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip("needs a GPU, which only pytest -m gpu sees"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let no test start ranks that is not marked so: what ``make test-quick`` selects starts none."""
    if any(item.get_closest_marker(mark) for mark in ("ranks", "slurm", "mpi")):
        return (yield)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{item.nodeid} starts ranks: mark it with pytest.mark.ranks")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local, "start", refuse)
        patched.setattr(type(RANKS), "call", refuse)
        return (yield)
