"""Contention: CPU cores and GPUs that other processes used while the ranks of a run measured something.

On a CPU: the busy time of the cores by the kernel's counters (``/proc/stat``, see proc(5)), minus the CPU time of the
ranks. On a GPU: the processes that NVML lists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import Struct

from ptdbench.launch import settings
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import node
from ptdbench.measure import gpu_state
from ptdbench.terminal import rank_names

STAT = Path("/proc/stat")

#: Thresholds of other load, in cores and as a fraction of a node's cores: even an idle machine has some.
LEAST_CORES, LEAST_SHARE = 0.1, 0.005

#: Columns of ``/proc/stat``: user, nice, system, and steal (time taken by other virtual machines). Interrupts are
#: ignored, as the ranks' own messages cause some.
_BUSY = (0, 1, 2, 7)
_COLUMNS = 8  # later columns are included in user and nice


class OtherLoad(Struct, frozen=True):
    """The load of other processes on one node."""

    node: str  #: The node.
    cores: int  #: Number of cores that the ranks of the node may use.
    taken: float | None  #: Cores that other processes took, on average; null if the system does not say.
    gpu_ranks: list[int]  #: Ranks whose GPU other processes use.
    on_gpu: bool  #: Whether the ranks measured GPUs.

    @property
    def is_busy(self) -> bool:
        """True if this load may have slowed the measurement down."""
        if self.on_gpu:
            return bool(self.gpu_ranks)
        return self.taken is not None and self.taken > max(LEAST_CORES, LEAST_SHARE * self.cores)

    def slows(self, rank: int) -> bool:
        """Return whether this load may have slowed down this rank of the node."""
        return self.is_busy and (not self.on_gpu or rank in self.gpu_ranks)

    def __str__(self) -> str:
        if self.on_gpu:
            return f"other processes use the GPU{'s' * (len(self.gpu_ranks) > 1)} of {rank_names(self.gpu_ranks)}"
        return f"other processes took {self.taken or 0:.1f} of {self.cores} cores"


@dataclass(frozen=True)
class Spent:
    """Seconds between two points in time, as measured by one rank."""

    wall: float  #: Wall-clock time.
    own: float  #: CPU time of this rank, all threads.
    busy: Mapping[int, float]  #: CPU time of all processes by core, except cores whose counters do not advance.
    cores: Sequence[int]  #: The cores that the rank may use.


def watch(device: torch.device) -> Callable[[], list[OtherLoad]]:
    """Begin to observe other load; called in all ranks.

    Returns:
        A function to call in all ranks after the measurement; it returns the load of each node, the same in all ranks.
    """
    cores = sorted(settings.own_cores())
    wall, own, ticks = time.perf_counter(), time.process_time(), _ticks(cores)

    def stop() -> list[OtherLoad]:
        seconds = time.perf_counter() - wall, time.process_time() - own
        mine, gpu, users = Spent(*seconds, _busy_seconds(ticks, _ticks(cores)), cores), None, 0
        if device.type == "cuda":  # which GPU, and how many processes NVML sees on it, if it does
            gpu = gpu_state.identity(device)
            users = next((one["processes"] or 0 for one in gpu_state.inspect()["gpus"] if one["uuid"] == gpu), 0)
        told: list[tuple[str, Spent, str | None, int]] = gather((node(os.environ), mine, gpu, users))
        return [_of_node(name, told, device.type == "cuda") for name in dict.fromkeys(one[0] for one in told)]

    return stop


def taken(ranks: Sequence[Spent]) -> tuple[int, float | None]:
    """Return how many cores the ranks of a node may use, and how many of these other processes took."""
    busy = {core: seconds / rank.wall for rank in ranks for core, seconds in rank.busy.items()}
    count = len({core for rank in ranks for core in rank.cores})
    own = sum(rank.own / rank.wall for rank in ranks)
    return count, max(0.0, sum(busy.values()) - own) if len(busy) == count else None


def busy_ticks(stat: str, of: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Parse ``/proc/stat``: return busy ticks and total ticks for each of these cores."""
    wanted = {f"cpu{core}": core for core in of}
    lines = (line.split() for line in stat.splitlines())
    ticks = {wanted[name]: [*map(int, values[:_COLUMNS])] for name, *values in filter(None, lines) if name in wanted}
    return {core: (sum(row[i] for i in _BUSY if i < len(row)), sum(row)) for core, row in ticks.items()}


def _ticks(cores: Sequence[int]) -> dict[int, tuple[int, int]]:
    try:
        return busy_ticks(STAT.read_text(), cores)
    except (OSError, ValueError):  # not Linux
        return {}


def _busy_seconds(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> dict[int, float]:
    """Return the busy seconds of each core, except cores whose counters do not advance."""
    hertz = os.sysconf("SC_CLK_TCK")
    moved = [core for core in before if core in after and after[core][1] > before[core][1]]
    return {core: (after[core][0] - before[core][0]) / hertz for core in moved}


def _of_node(name: str, told: Sequence[tuple[str, Spent, str | None, int]], on_gpu: bool) -> OtherLoad:
    here = [(rank, of) for rank, of in enumerate(told) if of[0] == name]
    count, others = taken([of[1] for _, of in here])
    users = [of[2] for _, of in here]
    shared = [rank for rank, (_, _, gpu, processes) in here if gpu and processes > users.count(gpu)]
    return OtherLoad(name, count, others, shared, on_gpu)
