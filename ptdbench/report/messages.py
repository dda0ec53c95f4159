"""The tables of ``workload=p2p`` and ``workload=collectives``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ptdbench.report.reason import wrap
from ptdbench.report.text import drawn
from ptdbench.terminal import plural
from ptdbench.units import size_text, three_digits, time_text

_MISSING = "-"

#: Rows that a person still reads; of more, only some sizes are shown.
_ROWS = 60

#: Ranks whose pairs still fit into a matrix of figures; of more, only the slowest pairs are shown.
_MATRIX = 8
_SLOWEST = 10


def render_p2p(p2p: Mapping[str, Any], width: int) -> str:
    """Latency and bandwidth by pair, both directions at once, and what hides behind computation."""
    pairs = p2p["pairs"]
    ranks = 1 + max(max(pair["source"], pair["target"]) for pair in pairs)
    largest = max((size["bytes"] for pair in pairs for size in pair["sizes"]), default=0)
    bandwidth = f"bandwidth at {size_text(largest)} in GB/s"
    if ranks <= _MATRIX:
        blocks = [
            _matrix("latency in µs, from row to column", pairs, "latency", 1e6, ranks, width),
            _matrix(f"{bandwidth}, from row to column", pairs, "bandwidth", 1e-9, ranks, width),
        ]
    else:
        blocks = [_slowest(f"the {_SLOWEST} slowest of {len(pairs)} pairs, {bandwidth}", pairs, width)]
    blocks += [_exchanges(p2p["both"], width)] if any(pair["sizes"] for pair in p2p["both"]) else []
    blocks += [_overlap(p2p["overlap"], width)] if p2p["overlap"] else []
    return "\n\n".join([*blocks, *_cut(p2p["cut"], width)])


def render_collectives(collectives: Mapping[str, Any], width: int) -> str:
    """Times and bandwidths by size, the fits, and what the bandwidths mean."""
    groups = collectives["groups"]
    title = f"{plural(len(groups), 'group')} of {len(groups[0])} ranks"
    if len(groups) > 1:
        title += f" ({collectives['group']}), at the same time"
    blocks = [f"{title}; every result was checked\n{_sizes(collectives['results'], width)}"]
    blocks += [_fits(collectives["fits"], width)] if collectives["fits"] else []
    remarks = [*_definitions(collectives, width), *_cut(collectives["cut"], width)]
    if collectives["left_out"]:
        remarks.append(wrap(f"left out, not in this backend: {', '.join(collectives['left_out'])}", width))
    if collectives.get("kept"):
        remarks.append(wrap(collectives["kept"], width))
    return "\n\n".join([*blocks, "\n".join(remarks)])


def _rate(bytes_per_second: float | None) -> str:
    return _MISSING if bytes_per_second is None else three_digits(bytes_per_second / 1e9)


def _matrix(title: str, pairs: Iterable[Mapping[str, Any]], name: str, scale: float, ranks: int, width: int) -> str:
    figures = {(pair["source"], pair["target"]): pair[name] for pair in pairs if pair[name] is not None}
    numbers = [str(rank) for rank in range(ranks)]
    rows = []
    for source in range(ranks):
        cells = [figures.get((source, target)) for target in range(ranks)]
        rows.append([numbers[source], *(_MISSING if cell is None else three_digits(cell * scale) for cell in cells)])
    return f"{title}\n{drawn(['rank', *numbers], rows, width, words=['rank'])}"


def _slowest(title: str, pairs: Iterable[Mapping[str, Any]], width: int) -> str:
    measured = sorted((pair for pair in pairs if pair["bandwidth"]), key=lambda pair: pair["bandwidth"])
    rows = [
        [str(pair["source"]), str(pair["target"]), three_digits(1e6 * pair["latency"]), _rate(pair["bandwidth"])]
        for pair in measured[:_SLOWEST]
    ]
    return f"{title}\n{drawn(['from', 'to', 'latency µs', 'GB/s'], rows, width)}"


def _exchanges(both: Sequence[Mapping[str, Any]], width: int) -> str:
    """Of each pair, the largest size; of many pairs, the slowest."""
    last = [(pair["ranks"], pair["sizes"][-1]) for pair in both if pair["sizes"]]
    rows = [
        [_pair(ranks), size_text(size["bytes"]), time_text(size["seconds"]["median"]), _rate(size["bandwidth"])]
        for ranks, size in sorted(last, key=lambda one: one[1]["bandwidth"])[:_SLOWEST]
    ]
    shown = drawn(["ranks", "size", "time", "GB/s"], rows, width, words=["ranks"])
    of_many = f", the {_SLOWEST} slowest of {len(last)} pairs" if len(last) > _SLOWEST else ""
    return f"both directions at once{of_many}\n{shown}"


def _overlap(overlap: Sequence[Mapping[str, Any]], width: int) -> str:
    headings = ["ranks", "size", "exchange", "computation", "together", "hidden"]
    rows = []
    for row in sorted(overlap, key=lambda row: row["hidden"])[: 2 * _SLOWEST]:
        times = (time_text(row[name]) for name in ("communication", "computation", "together"))
        rows.append([_pair(row["ranks"]), size_text(row["bytes"]), *times, f"{100 * row['hidden']:.0f}%"])
    shown = drawn(headings, rows, width, words=["ranks"])
    return f"exchange with computation between post and wait, the least hidden first\n{shown}"


def _pair(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} and {ranks[1]}"


def _sizes(results: Sequence[Mapping[str, Any]], width: int) -> str:
    """A row for each operation and size; where that is too much to read, for every so many-th size and the last."""
    every = max(1, -(-len(results) // _ROWS))
    headings = ["operation", "size", "time", "p5", "p95", "algbw GB/s", "busbw GB/s"]
    shown = []
    for name, rows in groupby(results, key=_name):
        of_series = list(rows)
        for number, row in enumerate(of_series):
            if number % every and row is not of_series[-1]:
                continue
            times = (time_text(row["seconds"][which]) for which in ("median", "p5", "p95"))
            size = size_text(row["bytes"]) if row["bytes"] else _MISSING
            shown.append(["" if number else name, size, *times, _rate(row["algbw"]), _rate(row["busbw"])])
    thinned = f"\n{len(results)} figures, not all of them shown: the record has the rest" if every > 1 else ""
    return f"{drawn(headings, shown, width, words=['operation'])}{thinned}"


def _fits(fits: Sequence[Mapping[str, Any]], width: int) -> str:
    headings = ["operation", "alpha µs", "±", "1/beta GB/s", "R2", "worst", "sizes"]
    rows = []
    for fit in fits:
        line = (
            three_digits(1e6 * fit["alpha"]),
            three_digits(1e6 * fit["alpha_error"]),
            _rate(1 / beta if (beta := fit["beta"]) > 0 else None),
        )
        doubts = f"{fit['r2']:.3f}", f"{100 * fit['max_relative_error']:.0f}%", str(fit["points"])
        rows.append([_name(fit), *line, *doubts])
    shown = drawn(headings, rows, width, words=["operation"])
    return f"fitted: time = alpha + beta * bytes; worst: how far the line was off at one size\n{shown}"


def _definitions(collectives: Mapping[str, Any], width: int) -> Iterator[str]:
    """How the bandwidths of the operations shown are computed, operations of one formula together."""
    definitions = collectives["definitions"]
    shown = dict.fromkeys(row["op"] for row in collectives["results"] if row["algbw"] is not None)
    formulas: dict[str, list[str]] = {}
    for op in shown:
        formulas.setdefault(definitions["busbw"][op], []).append(op)
    if shown:
        ranks = len(collectives["groups"][0])
        yield f"algbw = {definitions['algbw']}, after {definitions['source']}; n = {ranks} ranks"
    for formula, ops in formulas.items():
        yield wrap(f"busbw = {formula}: {', '.join(ops)}", width)


def _cut(cut: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    for row in cut:
        yield wrap(f"{_what(row)}: not from {size_text(row['from_bytes'])} on: {row['reason']}", width)


def _what(row: Mapping[str, Any]) -> str:
    if "source" in row:
        return f"rank {row['source']} to rank {row['target']}"
    return f"ranks {_pair(row['ranks'])}" if "ranks" in row else _name(row)


def _name(row: Mapping[str, Any]) -> str:
    """What is measured, in words: ``all_reduce fp32 sum async``."""
    return " ".join(str(row[part]) for part in ("op", "dtype", "reduction", "mode") if row[part])
