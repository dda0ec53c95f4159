"""A minimal send and receive: a tensor passes around the ring of ranks.

``python -m ptdbench.examples.send_recv``, or under any launcher.
"""

import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ptdbench.launch import local
from ptdbench.launch.rendezvous import process_group
from ptdbench.launch.world import discover


def pass_round(environ: Mapping[str, str]) -> None:
    """Run on each rank: rank 0 sends first, every other rank receives first; otherwise all would deadlock."""
    world = discover(os.environ)
    assert world is not None
    with process_group(world, "gloo", torch.device("cpu"), key="send_recv"):
        token = torch.zeros(1)
        if world.rank > 0:
            dist.recv(token, world.rank - 1)
        token += world.rank
        if world.size > 1:
            dist.send(token, (world.rank + 1) % world.size)
        if world.rank == 0 and world.size > 1:
            dist.recv(token, world.size - 1)
        sys.stdout.write(f"rank {world.rank} of {world.size} has {token.item():g}\n")


if __name__ == "__main__":
    if discover(os.environ):
        pass_round(os.environ)
    else:
        local.start(pass_round, 2)
