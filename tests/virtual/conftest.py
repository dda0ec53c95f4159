"""Programs on virtual GPUs: started with the library's variables, as it cannot be loaded into a process that runs."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from ptdbench.virtual import library
from ptdbench.virtual.device import Device
from tests.conftest import ROOT
from tests.programs import call

GIB = 1 << 30

#: Round figures, so that a test can say what it expects.
DEVICE = Device(
    name="NVIDIA Test 20GB",
    memory=20 * GIB,
    context=GIB,
    multiprocessors=100,
    capability="9.0",
    bandwidth=1e12,
    memory_clock=2e9,
    bus_width=4096,
    clock=1.5e9,
    l2=32 << 20,
    shared_memory=227 << 10,
    peaks={"fp32": 50e12, "tf32": 400e12, "bf16": 800e12},
    link=100e9,
    power=500,
)

Start = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of pytest share, so that what takes seconds is done by the first that needs it."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def start(environ: dict[str, str], shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run ``python -m tests.virtual.PROGRAM RANK`` for each rank; what each has printed as JSON, and its errors."""
    if shutil.which("cc") is None:
        pytest.skip("left out: a virtual GPU needs a C compiler")
    if torch.version.cuda is None or sys.platform != "linux":
        pytest.skip(f"left out: a virtual GPU needs torch's build for CUDA, and this is {torch.__version__}")

    def run(program: str, ranks: int = 1, **options: bool) -> list[dict[str, Any]]:
        kept = shared / f"{program} {' '.join(options)}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_text(json.dumps(_carried_out(program, ranks, options)))
        found: list[dict[str, Any]] = json.loads(kept.read_text())
        return found

    def _carried_out(program: str, ranks: int, options: dict[str, bool]) -> list[dict[str, Any]]:
        variables = library.environment(DEVICE, 2, **options)
        meeting = tmp_path_factory.mktemp("meeting") / "store"
        env = {**environ, **variables, "CUDA_VISIBLE_DEVICES": "0,1", "MEETING": str(meeting)}

        def answers(rank: int) -> dict[str, Any]:
            command = (sys.executable, "-m", f"tests.virtual.{program}", str(rank))
            done = call(*command, cwd=ROOT, environ=env, timeout=120)
            assert done.returncode == 0, done.stderr
            return {**json.loads(done.stdout.splitlines()[-1]), "errors": done.stderr}

        with ThreadPoolExecutor(ranks) as threads:
            return list(threads.map(answers, range(ranks)))

    return run
