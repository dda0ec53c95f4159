"""A minimal program that starts its own ranks and trains: ``python -m ptdbench.examples.toy``."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ptdbench.launch import local
from ptdbench.launch.world import discover


def train(environ: dict[str, str]) -> None:
    """Run on each rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())  # the same weights, but different data
    for step in range(50):
        inputs = torch.randn(32, 8)
        loss = mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()  # averages the gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            line = f"rank {dist.get_rank()} of {dist.get_world_size()}  step {step + 1}  loss {loss.item():.5f}\n"
            sys.stdout.write(line)  # one write: print() may make two, and another rank's output could come between
    dist.destroy_process_group()


if __name__ == "__main__":
    if world := discover(os.environ):
        sys.exit(f"{world.launcher} has started {world.size} ranks already; start this one with plain python")
    local.start(train, 2)
