"""The workload ``hello``: every rank reports its location and settings, and all compute one all-reduce."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ptdbench.job import Job, Outcome
from ptdbench.launch.address import meeting_point
from ptdbench.measure import results


@dataclass(frozen=True)
class Hello:
    """List the ranks; needs no model and no data."""

    trains = False

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Accept any ranks."""

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part; raise ArithmeticError if the sum is wrong."""
        return Outcome(hello=meet(job))


def meet(job: Job) -> results.Hello:
    """Sum the ranks' numbers, and describe the ranks; called in all ranks. Raise ArithmeticError for a wrong sum."""
    total = torch.tensor(float(job.world.rank + 1), device=job.device)
    dist.all_reduce(total)
    size = job.world.size
    expected = size * (size + 1) / 2
    if total.item() != expected:
        raise ArithmeticError(f"the all-reduce of 1 to {size} gives {total.item():g}, not {expected:g}")
    return results.Hello(job.world.launcher, job.spec.backend, *meeting_point(job.world, os.environ), [*job.peers])
