"""Programs that tests start as a person does, what tests wait for, and a terminal."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

#: What a person types ahead of the overrides, and the same for two ranks of torchrun.
TRAIN = (sys.executable, str(ROOT / "train.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN[1])


def call(
    *command: str | Path, cwd: Path, environ: Mapping[str, str], timeout: float = 240, told: str = ""
) -> subprocess.CompletedProcess[str]:
    """What a command that can import this project says, and its exit status."""
    env = {**environ, "PYTHONPATH": os.pathsep.join([*filter(None, [environ.get("PYTHONPATH")]), str(ROOT)])}
    return subprocess.run(
        command, cwd=cwd, env=env, input=told, capture_output=True, text=True, timeout=timeout, check=False
    )


def active(programs: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a shell in which the virtual environment with these programs is active."""
    kept = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return {**kept, "PATH": f"{programs}{os.pathsep}{kept['PATH']}"}


def until(condition: Callable[[], Any], seconds: float = 200) -> Any:
    """What ``condition`` comes to; the patience only bounds a test that fails."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
    return found


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True
