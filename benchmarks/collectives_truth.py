"""Whether ``workload=collectives`` tells the truth: its time per all_reduce against a bare loop's.

    python benchmarks/collectives_truth.py                 # all ranks of this machine
    python benchmarks/collectives_truth.py --rounds 100

The product's side is what the workload does at one size: prepare, repeat, compare the ranks. The bare side is a loop
over ``torch.distributed.all_reduce`` between two readings of the clock, whose lists the ranks then gather and compare.
The bare loop runs twice, so that its ratio to itself shows what this machine can resolve. The three take turns block
by block in the same processes and the same group, in every order equally often; a block's time is its median
repetition, each repetition costs what its slowest rank took, and the ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.rank import on_ranks
from benchmarks.ratio import against_bare, in_turns, median_of_ratios, within
from benchmarks.script import parser_of, read
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.measure import timing
from ptdbench.measure.operations import DTYPES, OPERATIONS, REDUCTIONS, Place
from ptdbench.measure.timing import Effort

#: Bytes of the message, and how often it is sent in a block.
SIZES = {2**10: 300, 2**20: 50, 2**26: 10}

#: Both ends of the ratio's interval lie within so much of 1.
LIMIT = 0.05

#: Repetitions before each block.
WARMUP = 2

#: Seconds of the median repetition of a block, the slowest rank's.
Block = Callable[[int], float]


def main() -> int:
    """Print the pairs; 1 if one of them misses."""
    options = _parse()
    ranks, found = on_ranks(read("workload=collectives"), _take_turns, options.rounds)
    print(f"time per all_reduce, fp32, {ranks} ranks: {options.rounds} rounds")
    passed = []
    for size, seconds in found.items():
        print(f"  {int(size) / 2**10:,.0f} KiB, bare {statistics.median(seconds['bare']) * 1e6:,.1f} µs")
        rule = f"within {LIMIT:.0%}"
        passed.append(against_bare(seconds, median_of_ratios, within(LIMIT), rule, "--rounds", indent="    "))
    return int(not all(passed))


def _take_turns(job: Job, rounds: int) -> tuple[int, dict[int, dict[str, list[float]]]]:
    """One rank: how many there are, and all three sides by turns, for each size."""
    found, device = {}, job.device
    for size, count in SIZES.items():
        blocks = {"product": _product(size, device), "bare": _bare(size, device), "again": _bare(size, device)}
        found[size] = in_turns({side: partial(block, count) for side, block in blocks.items()}, rounds)
    return job.world.size, found


def _product(size: int, device: torch.device) -> Block:
    """As ``workload=collectives`` times one size."""
    ranks = range(dist.get_world_size())
    place = Place(None, ranks, dist.get_rank(), device, DTYPES["fp32"], REDUCTIONS["sum"])
    message = OPERATIONS["all_reduce"].prepare(place, size // 4)

    def block(count: int) -> float:
        effort = Effort(min_repetitions=count, max_repetitions=count, warmup=WARMUP, max_seconds=float("inf"))
        return statistics.median(timing.repeat(message.call, device, effort))

    return block


def _bare(size: int, device: torch.device) -> Block:
    """The same as one would write it by hand."""
    data = torch.zeros(size // 4, device=device)

    def block(count: int) -> float:
        dist.barrier()
        for _ in range(WARMUP):
            dist.all_reduce(data)
        dist.barrier()
        seconds = _by_events(data, count) if device.type == "cuda" else _by_host(data, count)
        return statistics.median(max(of_ranks) for of_ranks in zip(*gather(seconds), strict=True))

    return block


def _by_host(data: torch.Tensor, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        dist.all_reduce(data)
        seconds.append(time.perf_counter() - started)
    return seconds


def _by_events(data: torch.Tensor, count: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for before, after in events:
        before.record()
        dist.all_reduce(data)
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in events]


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each side (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
