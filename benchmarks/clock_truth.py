"""Whether ``workload=collectives`` and ``workload=matmul`` tell the truth: their times against bare loops by hand.

    make overhead ARGS=collectives                                  # all_reduce, all ranks of this machine
    make overhead ARGS="products --turns 100 --threads 2"           # a product of 512 x 512 in fp32

The product's side is what the workload does at one size. The bare side is a loop between two readings of the device's
clock: over ``dist.all_reduce``, where a repetition costs what its slowest rank took, or over ``torch.mm``, after a
write of a buffer larger than the last cache. Both give the median of a block; the ratios are medians over the turns.
Good is an interval within 5 % of 1.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.rank import on_ranks
from benchmarks.ratio import against_bare, in_turns, median_of_ratios, within
from benchmarks.script import options, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.measure import clock, timing
from ptdbench.measure.operations import DTYPES, OPERATIONS, REDUCTIONS, GroupRank
from ptdbench.measure.products import ProductShape, cache_bytes, product_seconds
from ptdbench.measure.timing import Effort

#: Bytes of the message, and how often it is sent in a block.
SIZES = {2**10: 300, 2**20: 50, 2**26: 10}

#: Repetitions before a block of messages, seconds of a block of products, and their shape.
WARMUP, SECONDS, SHAPE = 2, 0.05, ProductShape(512, 512, 512)


def main() -> int:
    """Print the ratios; 1 if one of them misses."""
    subject = sys.argv.pop(1)
    given = options(__doc__, turns=(60, "blocks of each side"), threads=(1, "of products"))
    if subject == "products":
        torch.set_num_threads(given.threads)
        sides = {"product": _product, "bare": _bare_product(), "again": _bare_product()}
        seconds = in_turns(sides, given.turns)
        rate = SHAPE.flops / statistics.median(seconds["bare"]) / 1e12
        print(f"{SHAPE} fp32, threads {given.threads}: {given.turns} turns, bare loop {rate:.3g} TFLOP/s (median)")
        return int(not against_bare(seconds, median_of_ratios, *within(0.05), "products"))
    ranks, found = on_ranks(read("workload=collectives"), _messages_in_turns, given.turns)
    print(f"time per all_reduce, fp32, {ranks} ranks: {given.turns} turns")
    passed = []
    for size, seconds in found.items():
        print(f"  {int(size) / 2**10:,.0f} KiB, bare {statistics.median(seconds['bare']) * 1e6:,.1f} µs")
        passed.append(against_bare(seconds, median_of_ratios, *within(0.05), f"all_reduce {size}"))
    return int(not all(passed))


def _product() -> float:
    return statistics.median(product_seconds(SHAPE, "fp32", torch.device("cpu"), SECONDS))


def _bare_product() -> Callable[[], float]:
    a, b = torch.randn(SHAPE.m, SHAPE.k), torch.randn(SHAPE.k, SHAPE.n)
    wide = torch.zeros(2 * cache_bytes(a.device) // 4)

    def loop() -> float:
        watch, end, count = clock.for_device(a.device), time.perf_counter() + SECONDS, 0
        while time.perf_counter() < end or count < 5:
            wide.add_(1)
            watch.start()
            torch.mm(a, b)
            watch.stop()
            count += 1
        return statistics.median(watch.seconds())

    return loop


def _messages_in_turns(job: Job, turns: int) -> tuple[int, dict[int, dict[str, list[float]]]]:
    """In a rank: how many there are, and all three sides by turns, for each size."""
    found = {}
    for size, count in SIZES.items():
        bare: Callable[[], float] = partial(_bare_messages, torch.zeros(size // 4, device=job.device), count)
        sides = {"product": _messages(size, count, job.device), "bare": bare, "again": bare}
        found[size] = in_turns(sides, turns)
    return job.world.size, found


def _messages(size: int, count: int, device: torch.device) -> Callable[[], float]:
    """As ``workload=collectives`` times one size."""
    place = GroupRank(None, range(dist.get_world_size()), dist.get_rank(), device, DTYPES["fp32"], REDUCTIONS["sum"])
    message = OPERATIONS["all_reduce"].prepare(place, size // 4)
    effort = Effort(min_repetitions=count, max_repetitions=count, warmup=WARMUP, max_seconds=float("inf"))
    return lambda: statistics.median(timing.repeat(message.call, device, effort))


def _bare_messages(data: torch.Tensor, count: int) -> float:
    dist.barrier()
    for _ in range(WARMUP):
        dist.all_reduce(data)
    dist.barrier()
    watch = clock.for_device(data.device)
    for _ in range(count):
        watch.start()
        dist.all_reduce(data)
        watch.stop()
    return statistics.median(max(of_ranks) for of_ranks in zip(*gather(watch.seconds()), strict=True))


if __name__ == "__main__":
    sys.exit(main())
