"""The processes that a command has started, on every node: ``python -m benchmarks.gpu_cluster.processes MARK``."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.attack.victims import MARK, left
from benchmarks.script import ROOT


def environ(mark: str) -> dict[str, str]:
    """Return the variables of a command whose processes have this mark."""
    return {**os.environ, MARK: mark}


def seconds_until_gone(begun: Path, mark: str, nodes: int, process: subprocess.Popen[bytes], patience: float) -> float:
    """Return the seconds from the failure until no process of a command is left; infinite after ``patience``.

    Args:
        begun: A file that is created when the failure begins.
        mark: Marks the command's processes.
        nodes: Of the command.
        process: The command itself; it is killed if it outlasts the patience.
        patience: Seconds to wait.
    """
    started = time.time()
    while time.time() < started + patience:
        ended = process.poll() is not None
        if not begun.exists() and ended:  # it ended before
            return float("inf")
        if begun.exists() and ended and not _everywhere(mark, nodes):
            return time.time() - begun.stat().st_mtime
        time.sleep(0.2)
    process.kill()
    return float("inf")


def _everywhere(mark: str, nodes: int) -> list[int]:
    """Return the processes of a command on all of its nodes."""
    if nodes == 1:
        return here(mark)
    srun = ("srun", "--overlap", f"--nodes={nodes}", "--ntasks-per-node=1")
    command = (*srun, sys.executable, "-m", "benchmarks.gpu_cluster.processes", mark)
    # Without the mark: the search would find itself.
    output = subprocess.run(command, cwd=ROOT, env=environ(""), capture_output=True, text=True, check=True).stdout
    return [pid for line in output.splitlines() for pid in json.loads(line)]


def here(mark: str) -> list[int]:
    """Return those of this node, but not zombies, which have no variables."""
    return [process.pid for process in left(mark)]


if __name__ == "__main__":
    print(json.dumps(here(sys.argv[1])))
