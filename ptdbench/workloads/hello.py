"""The workload ``hello``: every rank reports its location and settings, and all compute one all-reduce."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from msgspec import to_builtins

from ptdbench.job import Job, Outcome
from ptdbench.launch.address import meeting_point
from ptdbench.report import workload_tables


@dataclass(frozen=True)
class Hello:
    """List the ranks; needs no model and no data."""

    trains = False
    show = staticmethod(workload_tables.hello_table)

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Accept any ranks."""

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part; raises ArithmeticError if the sum is wrong, as no result can be trusted then."""
        total = torch.tensor(float(job.world.rank + 1), device=job.device)
        dist.all_reduce(total)
        size = job.world.size
        expected = size * (size + 1) / 2
        if total.item() != expected:
            raise ArithmeticError(f"the sum of 1 to {size} over the ranks is {expected:g}, not {total.item():g}")
        address, port = meeting_point(job.world, os.environ)
        found = {"launcher": job.world.launcher, "backend": job.spec.backend, "address": address, "port": port}
        return Outcome({"hello": {**found, "ranks": to_builtins(job.peers)}})
