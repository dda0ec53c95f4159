"""Steps of a SLURM job: its script, which is no rank, has srun start fresh ranks for one run after the other."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptdbench.launch.world import World


@dataclass(frozen=True)
class JobSteps:
    """How the script of a job starts its ranks.

    Attributes:
        world: The ranks, as the first of them will see them.
        gpus: GPUs of a node.
        command: What starts them all; the directory of their run is appended.
    """

    world: World
    gpus: int
    command: Sequence[str]

    def start(self, directory: Path) -> int:
        """Have the ranks carry out the run of a directory, and wait for them; the exit status of srun."""
        step = subprocess.Popen([*self.command, str(directory)])
        try:
            return step.wait()
        except BaseException:
            step.terminate()  # srun ends its tasks
            step.wait()
            raise
