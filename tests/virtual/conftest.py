"""Programs on virtual GPUs: started with the library's variables, as it cannot be loaded into a process that runs."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from ptdbench.virtual.device import Device
from ptdbench.virtual.machine import Machine
from tests.conftest import ROOT
from tests.programs import call

GIB = 1 << 30

#: Round figures, so that a test can say what it expects.
DEVICE = Device(
    name="NVIDIA Test 20GB", memory=20 * GIB, context=GIB, multiprocessors=100, capability="9.0", bandwidth=1e12,
    memory_clock=2e9, bus_width=4096, clock=1.5e9, l2=32 << 20, shared_memory=227 << 10,
    peaks={"fp32": 50e12, "tf32": 400e12, "bf16": 800e12}, link=100e9, power=500,
)  # fmt: skip

Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of pytest share, so that what takes seconds is done by the first that needs it."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def start(environ: dict[str, str], shared: Path) -> Start:
    """Run ``python -m tests.virtual.PROGRAM``; what it has printed as JSON, and its errors."""
    if shutil.which("cc") is None:
        pytest.skip("left out: a virtual GPU needs a C compiler")
    if torch.version.cuda is None or sys.platform != "linux":
        pytest.skip(f"left out: a virtual GPU needs torch's build for CUDA, and this is {torch.__version__}")

    def run(program: str) -> dict[str, Any]:
        kept = shared / f"{program}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                env = environ | Machine(DEVICE).environment(2)
                done = call(sys.executable, "-m", f"tests.virtual.{program}", cwd=ROOT, environ=env, timeout=120)
                assert done.returncode == 0, done.stderr
                kept.write_text(json.dumps({**json.loads(done.stdout.splitlines()[-1]), "errors": done.stderr}))
        answers: dict[str, Any] = json.loads(kept.read_text())
        return answers

    return run
