"""Steps of a job, with a shell in the place of srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ptdbench.launch.slurm import JobSteps
from ptdbench.launch.world import World
from tests.programs import until

WORLD = World(0, 4, 0, 2, "SLURM", nodes=2)


def test_the_directory_is_appended_and_the_status_returned(tmp_path):
    assert JobSteps(WORLD, 0, ["sh", "-c", 'echo found > "$0/word"; exit 3']).start(tmp_path) == 3
    assert (tmp_path / "word").read_text() == "found\n"


def test_who_is_told_to_end_ends_the_step(tmp_path):
    program = (
        "from pathlib import Path\n"
        "from ptdbench.launch import local\n"
        "from ptdbench.launch.slurm import JobSteps\n"
        "from tests.launch.test_job_steps import WORLD\n"
        "local.stop_on_signals()\n"
        f"JobSteps(WORLD, 0, ['sh', '-c', 'echo $$ > $0/pid; exec sleep 60']).start(Path({str(tmp_path)!r}))\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text())
    starter.send_signal(signal.SIGTERM)
    assert starter.wait(30)
    assert not _lives(int(pid.read_text()))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "sleep" in Path(f"/proc/{pid}/cmdline").read_text()
