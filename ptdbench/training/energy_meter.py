"""Meters the hardware of a training run while it runs steps, between the interruptions of these."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ptdbench.job import Job
from ptdbench.launch.together import gather
from ptdbench.measure import topology
from ptdbench.measure.energy import Gpu, Packages, energy, none
from ptdbench.training.loop import StepLoop


class EnergyMeter:
    """Meters stretches of steps, from one interruption (evaluation, drain, checkpoint) to the next.

    At both ends of a stretch the device has no work left, as an interruption waits for it anyway: counters then belong
    to whole steps. The first stretch begins at the first interruption after ``train.warmup_steps`` steps. Each rank
    reads its GPU, and the first rank of each node the CPU packages of its machine.

    Args:
        job: The run.
        loop: Its step loop, before the first step.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self._job, self._loop = job, loop
        self._warmup = job.spec.config.train.warmup_steps
        host = socket.gethostname()
        real = not job.spec.virtual  # whose energy would be that of a machine that imitates it
        self._cpu = Packages(host) if real and job.world.local_rank == 0 else None
        self._gpu = Gpu(host, topology.identity(job.device)) if real and job.device.type == "cuda" else None
        self._counters = [counter for counter in (self._cpu, self._gpu) if counter and counter.reason is None]
        self._began: tuple[int, float] | None = None

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """What is done between two steps, which does not count; called in all ranks."""
        self.stop()
        yield
        if self._loop.taken >= self._warmup:
            for counter in self._counters:
                counter.begin()
            self._began = self._loop.taken, time.perf_counter()

    def stop(self) -> None:
        """End the stretch, if there is one; waits for the device."""
        if self._began is None or not self._counters:
            return
        if self._gpu:
            self._gpu.look()  # it still works
            torch.cuda.synchronize(self._job.device)
        (first, began), self._began = self._began, None
        steps, seconds = self._loop.taken - first, time.perf_counter() - began
        for counter in self._counters:
            counter.end(steps, seconds)

    def finish(self) -> dict[str, Any] | None:
        """The field ``hardware`` of the record; called in all ranks after the last step."""
        if self._job.spec.virtual:
            return None
        cpu = self._cpu.counted() if self._cpu else None
        gpu = (self._gpu.counted(), self._gpu.clocks()) if self._gpu else None
        told = gather((cpu, gpu))
        if self._gpu:
            self._gpu.close()
        cpus = [one for one, _ in told if one]
        gpus = {rank: one for rank, (_, one) in enumerate(told) if one}
        batch, tokens = self._job.training.layout.global_batch, self._job.training.data.tokens_per_sample
        counted = [of for of, _ in gpus.values()]
        return {
            "cpu": energy(Packages.source, cpus, batch, tokens),
            "gpu": energy(Gpu.source, counted, batch, tokens) if gpus else none("the run used no GPU"),
            "clocks": [{"rank": rank, **clocks} for rank, (_, clocks) in gpus.items()],
        }
