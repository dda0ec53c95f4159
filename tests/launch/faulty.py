"""A model that breaks on purpose: given to runs as ``model._target_=tests.launch.faulty.Faulty``."""

import atexit
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ptdbench.launch import lifetime

#: The words of a command line for it, without how it fails.
FAULTY = (
    "model=custom", f"model._target_={__name__}.Faulty", "data=synthetic_vectors", "data.inputs=8", "data.outputs=4",
)  # fmt: skip


class Faulty(nn.Module):
    """A linear layer that fails in a forward pass, on one rank.

    Args:
        how: ``raise``, ``kill`` (SIGKILL), ``crash`` (SIGSEGV), ``stop`` (SIGSTOP), ``term`` (SIGTERM), ``oom``,
            ``limit`` (its address space), ``wait`` (for a process, which is to end well) or ``none``. On all ranks:
            ``exit`` (as if all were well); and so that they do not end when they are done, ``thread`` (one that sleeps
            and is no daemon), ``thread_and_raise`` (on one rank) or ``atexit`` (a function that sleeps).
        rank: On which rank.
        call: In which forward pass, counted from 1.
    """

    def __init__(self, how: str, rank: int = 1, call: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.how = how
        self.here = os.environ.get("RANK") == str(rank)
        self.everywhere = how in ("thread", "atexit", "thread_and_raise", "exit")
        self.call = call
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        self.calls += not inputs.is_meta  # where its FLOPs are counted it does not count
        match self.how if (self.here or self.everywhere) and self.calls == self.call else "none":
            case "raise":
                raise RuntimeError("this one is on purpose")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                ctypes.string_at(0)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "oom":
                torch.empty(2**60)
            case "limit":
                used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
                resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
                torch.ones(2**26)  # 256 MiB
            case "wait":
                subprocess.run(["sleep", "3600"], check=True)
            case "exit" | "atexit" | "thread" | "thread_and_raise":
                self._end_on_all()
            case "none":
                pass
            case unknown:
                raise ValueError(unknown)
        return outputs

    def _end_on_all(self) -> None:
        lifetime.EXIT_SECONDS = 1.0  # so that tests wait for less
        if self.how == "exit":
            os._exit(0)
        if self.how == "atexit":
            atexit.register(time.sleep, 3600)
            return
        threading.Thread(target=time.sleep, args=(3600,), name="uploader").start()
        if self.how == "thread_and_raise" and self.here:
            print("last words", end="")  # in a buffer
            raise RuntimeError("this one is on purpose")
