"""A model whose ranks are done but do not end: ``model._target_=tests.launch.lingering.Lingering``."""

import atexit
import os
import threading
import time

import torch
from torch import Tensor, nn

from ptdbench.launch import forced_exit


class Lingering(nn.Module):
    """A linear layer, and what its author has forgotten.

    Args:
        how: ``thread`` (one that sleeps and is no daemon), ``atexit`` (a function that sleeps), ``exit`` (all ranks
            end in the second step as if all were well), or ``raise`` (the thread, and rank 1 fails).
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.how = how
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += not inputs.is_meta
        if self.calls == 2 and not inputs.is_meta:
            forced_exit.SECONDS = 1.0  # so that tests wait for less
            if self.how == "exit":
                os._exit(0)
            if self.how == "atexit":
                atexit.register(time.sleep, 3600)
            if self.how in ("thread", "raise"):
                threading.Thread(target=time.sleep, args=(3600,), name="uploader").start()
            if self.how == "raise" and torch.distributed.get_rank() == 1:
                print("last words", end="")  # in a buffer
                raise RuntimeError("this one is on purpose")
        return self.linear(inputs)
