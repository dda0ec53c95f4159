"""Is the ceiling of ``workload=matmul`` the truth? The product's figure against a bare loop over ``torch.mm``.

    python benchmarks/matmul_truth.py
    python benchmarks/matmul_truth.py --shape 1024 --dtype bf16 --threads 2

The product's side is what the workload does for one shape and dtype, its median rate. The bare side is a loop by hand
over matrices of its own: write a buffer larger than the last cache, take the time, multiply, take the time; and the
median. Both sides use the device's clock (:mod:`ptdbench.measure.clock`), on a GPU events in its stream: a clock of the
host would count what it takes to launch a product and to wait for it. The bare side is measured twice, so that its
ratio to itself shows what this machine can resolve. The three take turns in one process, in every order equally often;
the ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.ratio import against_bare, in_turns, median_of_ratios, within
from benchmarks.script import parser_of
from ptdbench.measure import clock
from ptdbench.measure.products import DTYPES, Shape, cache_bytes, product_seconds

#: By how much the product's figure may be off, as a share of the bare one.
LIMIT = 0.05


def main() -> int:
    """Print both ratios; 1 if the product's figure is off by more than it may."""
    options = _parse()
    torch.set_num_threads(options.threads)
    device, shape = torch.device(options.device), Shape.of(options.shape)

    def product() -> float:
        return statistics.median(product_seconds(shape, options.dtype, device, options.seconds))

    bare, again = (_bare(shape, options, device) for _ in range(2))
    medians = in_turns({"product": product, "bare": bare, "again": again}, options.turns)
    rate = shape.flops / statistics.median(medians["bare"])
    print(
        f"{shape} {options.dtype}, {device}, threads {options.threads}: {options.turns} turns, "
        f"bare loop {rate / 1e12:.3g} TFLOP/s (median)"
    )
    return int(not against_bare(medians, median_of_ratios, within(LIMIT), f"within {LIMIT:.0%}", "--turns"))


def _bare(shape: Shape, options: argparse.Namespace, device: torch.device) -> Callable[[], float]:
    """The same measurement as one would write it by hand: the median seconds of a product."""
    dtype = DTYPES[options.dtype]
    a = torch.randn(shape.m, shape.k, device=device).to(dtype)
    b = torch.randn(shape.k, shape.n, device=device).to(dtype)
    wide = torch.zeros(2 * cache_bytes(device) // 4, device=device)

    def loop() -> float:
        watch, end, count = clock.for_device(device), time.perf_counter() + options.seconds, 0
        while time.perf_counter() < end or count < 5:
            wide.add_(1)
            watch.start()
            torch.mm(a, b)
            watch.stop()
            count += 1
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # or the host would queue products for as long as it may
        return statistics.median(watch.seconds())

    return loop


def _parse() -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="512", help="a number, or MxNxK (default: %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=300, help="of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.05, help="of one turn of a side (default: %(default)s)")
    parser.add_argument("--device", default=device, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
