"""A minimal all-reduce: ``python -m ptdbench.examples.all_reduce``, or under any launcher.

Data parallelism averages gradients over all ranks in this way.
"""

import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ptdbench.launch import local
from ptdbench.launch.rendezvous import process_group
from ptdbench.launch.world import discover


def average(environ: Mapping[str, str]) -> None:
    """Run on each rank."""
    world = discover(os.environ)
    assert world is not None
    with process_group(world, "gloo", torch.device("cpu"), key="all_reduce"):
        gradient = torch.tensor([1.0, 10.0]) * (world.rank + 1)
        dist.all_reduce(gradient)  # in place: every rank has the sum
        gradient /= world.size
        sys.stdout.write(f"rank {world.rank} of {world.size}: the mean is {gradient.tolist()}\n")


if __name__ == "__main__":
    if discover(os.environ):
        average(os.environ)
    else:
        local.start(average, 2)
