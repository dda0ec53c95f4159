"""Whether the host waits for the GPU within a step: torch's guard raises where it would.

    python benchmarks/silent_steps.py precision=bf16 train.clip_norm=1

The arguments are those of ``train.py``. After three steps the guard is switched on for five more. A step that reads a
number from the device, or copies to it from memory that is not pinned, ends this with a traceback that names the line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from omegaconf import DictConfig
from rank import joined

from ptdbench.launch import local
from ptdbench.setup.compose import compose_all
from ptdbench.workloads.train import assemble


def main(overrides: Sequence[str]) -> int:
    """Take the steps in one rank; 1 if one of them waited."""
    typed = ["parallel=single", "cluster.ranks_per_node=1", *overrides]
    composed = compose_all(typed).jobs[0]
    with TemporaryDirectory() as directory:
        try:
            local.start(_guarded_steps, 1, composed, directory)
        except local.RankDied:
            print("a step failed under the guard; its traceback is above")
            return 1
        print(Path(directory, "said").read_text())
    return 0


def _guarded_steps(environ: Mapping[str, str], composed: DictConfig, directory: str) -> None:
    with joined(environ, composed, directory) as job:
        loop = assemble(job)
        for _ in range(3):
            loop.step()
        on_gpu = job.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            loop.step()
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        loop.feed.close()
        said = "five steps without waiting for the device" if on_gpu else "five steps ran, and a CPU has no guard"
        Path(directory, "said").write_text(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
