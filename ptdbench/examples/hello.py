"""A minimal rendezvous: ``python -m ptdbench.examples.hello``, or under any launcher."""

import os
import socket
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ptdbench.launch import local
from ptdbench.launch.rendezvous import process_group
from ptdbench.launch.world import discover


def greet(environ: Mapping[str, str]) -> None:
    """Run on each rank."""
    world = discover(os.environ)  # torchrun, srun and mpirun each set different variables
    assert world is not None
    with process_group(world, "gloo", torch.device("cpu"), key="hello"):
        line = f"hello from rank {world.rank} of {world.size}, {world.local_rank} of {world.local_size} on its node"
        sys.stdout.write(f"{line} {socket.gethostname()}\n")  # one write, so that the ranks' lines do not interleave
        dist.barrier()  # a rank that left early would close connections that slower ranks are still opening


if __name__ == "__main__":
    if discover(os.environ):
        greet(os.environ)
    else:
        local.start(greet, 2)  # no launcher: start two ranks here
