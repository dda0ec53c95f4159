"""Curves of what workloads that do not train found: collectives, links and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from statistics import median
from typing import Any

#: Links that are drawn; of more the fastest and the slowest ones.
_LINKS = 12

#: Bytes of a number in memory.
_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}

#: A figure: ``title``, the axes ``x`` and ``y``, and ``lines`` with the points of each.
Figure = dict[str, Any]


def curves(record: Mapping[str, Any]) -> list[Figure]:
    """The figures of a run: none for a workload that has none, or whose results are not what they should be."""
    draw = _OF.get(str(record.get("workload")))
    found = record.get(str(record.get("workload")))
    try:
        return draw(found) if draw and found else []
    except (LookupError, TypeError, ValueError, ArithmeticError):  # their types are not in the schema
        return []


def _collectives(found: Mapping[str, Any]) -> list[Figure]:
    """Bus bandwidth by size."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for result in found["results"]:
        if result["busbw"]:
            words = (result["op"], result["dtype"], result["reduction"], result["mode"])
            lines.setdefault(" ".join(word for word in words if word), []).append(result)
    return _by_size(
        "Collectives",
        "bus bandwidth",
        {name: [(r["bytes"], r["busbw"]) for r in of_line] for name, of_line in lines.items()},
    )


def _p2p(found: Mapping[str, Any]) -> list[Figure]:
    """Bandwidth of links by size."""
    pairs = sorted((pair for pair in found["pairs"] if pair["sizes"]), key=lambda pair: -(pair["bandwidth"] or 0.0))
    if len(pairs) > _LINKS:
        pairs = pairs[: _LINKS // 2] + pairs[-_LINKS // 2 :]
    links = {
        f"rank {pair['source']} to {pair['target']}": [(size["bytes"], size["bandwidth"]) for size in pair["sizes"]]
        for pair in pairs
    }
    return _by_size("Links between ranks", "bandwidth", links)


def _by_size(title: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> list[Figure]:
    drawn = [
        {"name": name, "x": [x for x, _ in points], "y": [y / 1e9 for _, y in points], "text": None}
        for name, points in lines.items()
    ]
    return [{"title": title, "x": "bytes", "y": f"{y} (GB/s)", "lines": drawn, "bounds": []}] if drawn else []


def _matmul(found: Mapping[str, Any]) -> list[Figure]:
    """A roofline: what products reach, below what memory and the fastest product allow.

    After S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", Communications of the ACM 52, 2009. The traffic of a product is that of its three matrices, once.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for rank in found["ranks"]:
        for product in rank["products"]:
            rates.setdefault((product["dtype"], product["shape"]), []).append(product["median"])
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for (dtype, shape), of_ranks in rates.items():
        lines.setdefault(dtype, []).append((_intensity(shape, dtype), median(of_ranks), shape))
    drawn = [
        {"name": dtype, **dict(zip(("x", "y", "text"), map(list, zip(*sorted(points), strict=True)), strict=True))}
        for dtype, points in lines.items()
    ]
    copies = [c["median"] for rank in found["ranks"] for c in rank["copies"] if c["kind"] == "within the device"]
    bounds = [_roof(line, median(copies)) for line in drawn if copies]
    for line in drawn:
        line["y"] = [rate / 1e9 for rate in line["y"]]
    axes = {"x": "FLOP per byte of memory traffic", "y": "GFLOP/s of a rank"}
    return [{"title": "Matrix products: roofline", **axes, "lines": drawn, "bounds": bounds}] if drawn else []


def _roof(line: Mapping[str, Any], bandwidth: float) -> Figure:
    """Memory bandwidth times intensity, up to the fastest product of the dtype."""
    fastest = max(line["y"])
    ridge = fastest / bandwidth
    x = sorted({min(*line["x"], ridge / 4), ridge, max(*line["x"], ridge)})
    return {"name": f"{line['name']} roof", "x": x, "y": [min(bandwidth * one, fastest) / 1e9 for one in x]}


def _intensity(shape: str, dtype: str) -> float:
    m, n, k = map(int, shape.split("x"))
    return 2 * prod((m, n, k)) / (_BYTES[dtype] * (m * k + k * n + m * n))


_OF: dict[str, Callable[[Mapping[str, Any]], list[Figure]]] = {
    "collectives": _collectives,
    "p2p": _p2p,
    "matmul": _matmul,
}
