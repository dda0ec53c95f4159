"""The tables of ``workload=matmul``: what the ranks' devices reach, and the ceiling that follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptdbench.report.text import drawn
from ptdbench.terminal import plural
from ptdbench.units import three_digits

#: Headings of what :func:`_cells` returns.
_FIGURES = ("mean", "median", "maximum", "slowest rank", "repeated")


def render(matmul: Mapping[str, Any], width: int) -> str:
    """What all ranks measured at once, as plain text."""
    ranks = matmul["ranks"]
    names = ", ".join(dict.fromkeys(rank["device"] for rank in ranks))
    count = plural(len(ranks), "rank")
    blocks = [
        f"matrix products on {count} at once ({names}): TFLOP/s of a rank",
        _products(ranks, matmul["ceilings"], width),
    ]
    if ranks[0]["copies"]:
        blocks += [f"copies of memory on {count} at once: GB/s of a rank", _copies(ranks, width)]
    return "\n".join([*blocks, *_ceilings(matmul["ceilings"]), *filter(None, [matmul.get("kept")])])


def _products(ranks: Sequence[Mapping[str, Any]], ceilings: Sequence[Mapping[str, Any]], width: int) -> str:
    best = {(ceiling["dtype"], ceiling["shape"]) for ceiling in ceilings}
    rows = []
    for number, product in enumerate(ranks[0]["products"]):
        dtype, shape = product["dtype"], product["shape"]
        mark = " (best)" if (dtype, shape) in best else ""
        rows.append([dtype, f"{shape}{mark}", *_cells([rank["products"][number] for rank in ranks], 1e12)])
    return drawn(["dtype", "shape", *_FIGURES], rows, width, words=["dtype", "shape"])


def _copies(ranks: Sequence[Mapping[str, Any]], width: int) -> str:
    rows = [
        [copy["kind"], f"{copy['bytes'] / 2**20:,.0f} MiB", *_cells([rank["copies"][number] for rank in ranks], 1e9)]
        for number, copy in enumerate(ranks[0]["copies"])
    ]
    return drawn(["copy", "size", *_FIGURES], rows, width, words=["copy", "size"])


def _cells(of_ranks: Sequence[Mapping[str, Any]], unit: float) -> list[str]:
    """Median over the ranks of each rank's mean, median and maximum, and which rank has the lowest median."""
    over_ranks = [statistics.median(rank[name] for rank in of_ranks) for name in ("mean", "median", "maximum")]
    slowest = min(range(len(of_ranks)), key=lambda rank: of_ranks[rank]["median"])
    least = min(rank["repetitions"] for rank in of_ranks)
    return [
        *(three_digits(rate / unit) for rate in over_ranks),
        f"{three_digits(of_ranks[slowest]['median'] / unit)} (rank {slowest})",
        f"{least}x",
    ]


def _ceilings(ceilings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for ceiling in ceilings:
        share = ceiling["share_of_peak"]
        of_peak = f"no share of a peak: {ceiling['peak_reason']}" if share is None else f"{share:.1%} of the peak"
        beside = ", taken beside other load" if ceiling.get("beside_load") else ""
        threads = ceiling["threads"]
        where = ceiling["device"] + ("" if threads is None else f", {plural(threads, 'thread')}")
        rate = three_digits(ceiling["flops_per_second"] / 1e12)
        yield f"ceiling of {where}: {rate} TFLOP/s in {ceiling['dtype']} ({ceiling['shape']}){beside}, {of_peak}"
