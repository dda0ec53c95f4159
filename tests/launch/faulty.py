"""A model that breaks on purpose: given to runs as ``model._target_=tests.launch.faulty.Faulty``."""

import ctypes
import os
import resource
import signal
import subprocess
from pathlib import Path

import torch
from torch import Tensor, nn

#: The words of a command line for it, without how it fails.
FAULTY = (
    "model=custom", f"model._target_={__name__}.Faulty", "data=synthetic_vectors", "data.inputs=8", "data.outputs=4",
)  # fmt: skip


class Faulty(nn.Module):
    """A linear layer that fails in a forward pass, on one rank.

    Args:
        how: ``raise``, ``kill`` (SIGKILL), ``crash`` (SIGSEGV), ``stop`` (SIGSTOP), ``term`` (SIGTERM), ``oom``,
            ``limit`` (its address space), ``diverge``, ``wait`` (for a process, which is to end well) or ``none``.
        rank: On which rank.
        call: In which forward pass, counted from 1.
    """

    def __init__(self, how: str, rank: int = 1, call: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.how = how
        self.here = os.environ.get("RANK") == str(rank)
        self.call = call
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        self.calls += not inputs.is_meta  # where its FLOPs are counted it does not count
        match self.how if self.here and self.calls == self.call else "none":
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
            case "diverge":
                return outputs * torch.nan
            case "wait":
                subprocess.run(["sleep", "3600"], check=True)
            case "none":
                pass
            case unknown:
                raise ValueError(unknown)
        return outputs
