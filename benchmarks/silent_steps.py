"""Whether the host waits for the GPU within a step: torch's guard raises where it would.

    python benchmarks/silent_steps.py precision=bf16 train.clip_norm=1

The arguments are those of ``train.py``. After three steps the guard is switched on for five more. A step that reads a
number from the device, or copies to it from memory that is not pinned, ends this with a traceback that names the line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.rank import on_ranks
from benchmarks.script import read
from ptdbench.job import Job
from ptdbench.launch import local
from ptdbench.workloads.train import assemble


def main(overrides: Sequence[str]) -> int:
    """Take the steps in one rank; 1 if one of them waited."""
    try:
        print(on_ranks(read("parallel=single", "cluster.ranks_per_node=1", *overrides), _guarded_steps))
    except local.RankDied:
        print("a step failed under the guard; its traceback is above")
        return 1
    return 0


def _guarded_steps(job: Job) -> str:
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
    return "five steps without waiting for the device" if on_gpu else "five steps ran, and a CPU has no guard"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
