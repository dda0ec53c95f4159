"""Contention: CPU cores and GPUs that other processes used during a measurement.

On a CPU: the busy time of the cores by the kernel's counters, minus the CPU time of the ranks. On a GPU: the processes
that NVML lists.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from ptdbench.launch import settings
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import node
from ptdbench.measure import gpu_state
from ptdbench.measure.results import OtherLoad

#: What counts as busy; ``steal`` is time taken by other virtual machines. Interrupts are ignored, as the ranks' own
#: messages cause some.
_BUSY = ("user", "nice", "system", "steal")


@dataclass(frozen=True)
class Spent:
    """Seconds between two points in time, as measured by one rank."""

    wall: float  #: Wall-clock time.
    cpu: float  #: CPU time of this rank, with all threads and data workers.
    busy: Mapping[int, float]  #: CPU time of all processes by core, except cores whose counters do not advance.
    cores: Sequence[int]  #: The cores that the rank may use.


class Watch:
    """Observes other load during one or several stretches of time, in all ranks; the first one begins at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cores = device, sorted(settings.own_cores())
        self._cpu, self._busy = 0.0, dict[int, float]()
        self._began = self._now()
        self.seconds = 0.0  #: The duration of all stretches.

    def begin(self) -> None:
        """Begin a stretch."""
        self._began = self._now()

    def end(self) -> None:
        """End the stretch."""
        (began, cpu, before), (ended, cpu_now, after) = self._began, self._now()
        self.seconds += ended - began
        self._cpu += cpu_now - cpu
        for core in before.keys() & after.keys():
            (busy, total), (busy_now, total_now) = before[core], after[core]
            if total_now > total:
                self._busy[core] = self._busy.get(core, 0.0) + busy_now - busy

    def stop(self) -> list[OtherLoad]:
        """End the stretch; see :meth:`load`."""
        self.end()
        return self.load()

    def load(self) -> list[OtherLoad]:
        """Return the load of each node over all stretches; called in all ranks, with the same result."""
        spent, gpu, users = Spent(self.seconds, self._cpu, self._busy, self._cores), None, 0
        on_gpu = self._device.type == "cuda"
        if on_gpu:  # which GPU, and how many processes NVML lists for it
            gpu = gpu_state.identity(self._device)
            users = ((state := gpu_state.inspect().get(gpu)) and state.processes) or 0
        of_ranks: list[tuple[str, Spent, str | None, int]] = gather((node(os.environ), spent, gpu, users))
        return [_of_node(name, of_ranks, on_gpu) for name in dict.fromkeys(name for name, *_ in of_ranks)]

    def _now(self) -> tuple[float, float, dict[int, tuple[float, float]]]:
        return time.perf_counter(), _cpu_seconds(), _spent(self._cores)


def taken(ranks: Sequence[Spent]) -> tuple[int, float | None]:
    """Return how many cores the ranks of a node may use, and how many of them other processes used on average."""
    busy = {core: seconds / rank.wall for rank in ranks for core, seconds in rank.busy.items()}
    count = len({core for rank in ranks for core in rank.cores})
    of_ranks = sum(rank.cpu / rank.wall for rank in ranks if rank.wall)  # 0 without a stretch, as after a few steps
    return count, max(0.0, sum(busy.values()) - of_ranks) if len(busy) == count else None


def _spent(cores: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return the busy and the total seconds of each of these cores since the machine started, as far as it counts."""
    times = dict(enumerate(psutil.cpu_times(percpu=True)))
    counted = {core: times[core] for core in cores if core in times}
    return {core: (sum(getattr(time, name, 0.0) for name in _BUSY), sum(time)) for core, time in counted.items()}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its workers."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):  # it has ended meanwhile
            spent = psutil.Process(worker.pid).cpu_times()
            seconds += spent.user + spent.system
    return seconds


def _of_node(name: str, of_ranks: Sequence[tuple[str, Spent, str | None, int]], on_gpu: bool) -> OtherLoad:
    ranks = [
        (rank, spent, gpu, processes) for rank, (node, spent, gpu, processes) in enumerate(of_ranks) if node == name
    ]
    count, others = taken([spent for _, spent, _, _ in ranks])
    gpus = [gpu for _, _, gpu, _ in ranks]
    shared = [rank for rank, _, gpu, processes in ranks if gpu and processes > gpus.count(gpu)]
    return OtherLoad(name, count, others, shared, on_gpu)
