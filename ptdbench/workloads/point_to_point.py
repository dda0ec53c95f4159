"""The workload ``p2p``: latency and bandwidth from every rank to every other, one pair at a time.

``a`` sends the message, and ``b`` answers with :data:`ANSWER` bytes on receipt: a round trip. Each times it by its own
clock, and the slower time counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.job import Job, Outcome
from ptdbench.measure import timing
from ptdbench.measure.operations import DTYPES, compare, sent
from ptdbench.measure.results import P2P, MessageSize, Pair
from ptdbench.measure.timing import Effort, median_of, summary
from ptdbench.problems import Problem, require

#: Bytes of the answer to a message.
ANSWER = 8

#: Buffers per message on a rank: sent, received, expected, and the backend's copy.
_COPIES = 4


@dataclass(frozen=True)
class PointToPoint(Effort):
    """Time messages between pairs of ranks; ``conf/workload/p2p.yaml`` describes the options."""

    pairs: str = "all"
    min_bytes: int = ANSWER
    max_bytes: int = 2**26
    factor: int = 2

    trains = False

    def __post_init__(self) -> None:
        """Raise ConfigError for options that are invalid on any ranks."""
        wrong = timing.problems(vars(self))
        if self.pairs not in ("all", "ring"):
            wrong.append(Problem("pairs", self.pairs, "must be all or ring", "try all, ring"))
        require(*wrong)

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for a single rank, and for a backend that cannot send."""
        mute = Problem("backend", backend, "cannot send GPU tensors", "try nccl, or device=cpu")
        of_gloo = mute if (backend, device_type) == ("gloo", "cuda") else None
        require(timing.single_rank("p2p", world_size), of_gloo)

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part."""
        return Outcome(p2p=measure(job, self))


def measure(job: Job, options: PointToPoint) -> P2P:
    """Run the requested measurements; called in all ranks, with the same result.

    Raises:
        ArithmeticError: A message arrived corrupted on this rank.
        ConfigError: The messages do not fit into memory.
    """
    need = _COPIES * options.max_bytes
    timing.require_memory(job.device, job.world.local_size, need, "workload.max_bytes", options.max_bytes)
    pairs = ordered_pairs(job.world.size, ring=options.pairs == "ring")
    return P2P([_one_way(job, options, *pair) for pair in pairs])


def ordered_pairs(ranks: int, ring: bool) -> Iterator[tuple[int, int]]:
    """Return ``(source, target)`` of each link; in a ring each rank sends only to the next one."""
    return ((rank, (rank + 1) % ranks) for rank in range(ranks)) if ring else permutations(range(ranks), 2)


def _one_way(job: Job, options: PointToPoint, source: int, target: int) -> Pair:
    latency = median_of(summary(_round_trips(job, options, source, target, ANSWER))) / 2
    rows: list[MessageSize] = []
    for size in timing.sizes(options.min_bytes, options.max_bytes, options.factor):
        job.watchdog.alive()
        seconds = _round_trips(job, options, source, target, size)
        times = summary(seconds)
        median = median_of(times)
        one_way = max(median - latency, median / 2)  # an answer is never slower than the message
        rows.append(MessageSize(size, len(seconds), times, one_way, size / one_way))
    return Pair(source, target, latency, rows[-1].bandwidth, rows)


def _round_trips(job: Job, options: PointToPoint, source: int, target: int, size: int) -> list[float]:
    """Return the seconds of each round trip of a message and its answer, on the slower of the two ranks."""
    rank, device = job.world.rank, job.device
    if rank not in (source, target):
        return timing.repeat(None, device, options)
    data, answer = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (size, ANSWER))
    _verify_one_way(data, source, target, rank)

    def send() -> None:
        dist.send(data, target)
        dist.recv(answer, target)

    def receive() -> None:
        dist.recv(data, source)
        dist.send(answer, source)

    seconds = timing.repeat(send if rank == source else receive, device, options)
    _verify_one_way(data, source, target, rank)
    return seconds


def _verify_one_way(data: Tensor, source: int, target: int, rank: int) -> None:
    expected = sent(source, data.numel(), DTYPES["uint8"], data.device)
    if rank == source:
        dist.send(expected, target)
    else:
        data.zero_()
        dist.recv(data, source)
        compare(data, expected, f"{data.numel()} bytes from rank {source} to rank {target}", rank)
