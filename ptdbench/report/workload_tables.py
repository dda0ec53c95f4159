"""The tables of workloads that do not train: hello, matmul, p2p, collectives and check."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from ptdbench.grouping import grouped
from ptdbench.launch.world import Peer
from ptdbench.measure import results
from ptdbench.report.text import MISSING, drawn, figure_text, wrap
from ptdbench.terminal import plural
from ptdbench.units import size_text, three_digits, time_text


def hello_table(hello: results.Hello, width: int) -> str:
    """Return the ranks of one run as plain text."""
    nodes = len({rank.node for rank in hello.ranks})
    title = (
        f"{plural(len(hello.ranks), 'rank')} on {plural(nodes, 'node')}, "
        f"started by {hello.launcher}, over {hello.backend} at {hello.address}:{hello.port}"
    )
    words = ("node", "host", "device", "cores")
    rows = [
        [
            str(rank.rank), str(rank.local_rank), str(rank.local_size), rank.node, rank.host, rank.device,
            ranges(rank.cores), str(rank.threads),
        ]
        for rank in hello.ranks
    ]  # fmt: skip
    table = drawn(["rank", "local", "of", *words, "threads"], rows, width, words=words)
    return "\n".join([title, table, *_settings(hello.ranks)])


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 3, 8]`` becomes ``0-3,8``."""
    alike = groupby(enumerate(sorted(numbers)), lambda placed: placed[1] - placed[0])  # constant in a range
    parts = [[number for _, number in part] for _, part in alike]
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _settings(ranks: Sequence[Peer]) -> Iterator[str]:
    """Yield a line for each variable, or one for each of its values if they differ between ranks."""
    for name in sorted({name for rank in ranks for name in rank.settings}):
        by_value = grouped((rank.settings.get(name, "(not set)"), rank.rank) for rank in ranks)
        for value, having in by_value.items():
            where = "" if len(by_value) == 1 else f"  (rank{'s' * (len(having) > 1)} {ranges(having)})"
            yield f"{name}={value}{where}"


#: Headings of the columns from :func:`_cells`.
_FIGURES = ("mean", "median", "maximum", "slowest rank", "repeated")


def matmul_tables(matmul: results.Matmul, width: int) -> str:
    """Render the simultaneous measurements of all ranks, as plain text."""
    ranks = matmul.ranks
    names = ", ".join(dict.fromkeys(rank.device for rank in ranks))
    count = plural(len(ranks), "rank")
    title = f"matrix products on {count} at once ({names}): TFLOP/s of a rank"
    table = _products(ranks, matmul.ceilings, width)
    return "\n".join([title, table, *_ceilings(matmul.ceilings), *filter(None, [matmul.kept])])


def _products(ranks: Sequence[results.RankProducts], ceilings: Sequence[results.Ceiling], width: int) -> str:
    best = {(ceiling.dtype, ceiling.shape) for ceiling in ceilings}
    rows = []
    for of_ranks in zip(*(rank.products for rank in ranks), strict=True):
        dtype, shape = of_ranks[0].dtype, of_ranks[0].shape
        rows.append([dtype, shape + " (best)" * ((dtype, shape) in best), *_cells(of_ranks)])
    return drawn(["dtype", "shape", *_FIGURES], rows, width, words=["dtype", "shape"])


def _cells(of_ranks: Sequence[results.Product]) -> list[str]:
    """Return medians over ranks of each rank's mean, median and maximum, and the rank with the lowest median."""
    over_ranks = [statistics.median(map(attrgetter(name), of_ranks)) for name in ("mean", "median", "maximum")]
    slowest = min(range(len(of_ranks)), key=lambda rank: of_ranks[rank].median)
    return [
        *(three_digits(rate / 1e12) for rate in over_ranks),
        f"{three_digits(of_ranks[slowest].median / 1e12)} (rank {slowest})",
        f"{min(rank.repetitions for rank in of_ranks)}x",
    ]


def _ceilings(ceilings: Sequence[results.Ceiling]) -> Iterator[str]:
    for ceiling in ceilings:
        share = ceiling.share_of_peak
        of_peak = f"no share of a peak: {ceiling.peak_reason}" if share is None else f"{share:.1%} of the peak"
        where = ceiling.device + ("" if ceiling.threads is None else f", {plural(ceiling.threads, 'thread')}")
        rate = three_digits(ceiling.flops_per_second / 1e12)
        yield f"ceiling of {where}: {rate} TFLOP/s in {ceiling.dtype} ({ceiling.shape}), {of_peak}"


#: Maximum number of readable rows; with more, only some sizes are shown.
_ROWS = 60

#: Maximum number of ranks for a matrix of pairs; with more, only the slowest pairs are shown.
_MATRIX = 8
_SLOWEST = 10


def p2p_tables(p2p: results.P2P, width: int) -> str:
    """Render latency and bandwidth by pair."""
    pairs = p2p.pairs
    ranks = 1 + max(max(pair.source, pair.target) for pair in pairs)
    largest = max((size.bytes for pair in pairs for size in pair.sizes), default=0)
    bandwidth = f"bandwidth at {size_text(largest)} in GB/s"
    if ranks <= _MATRIX:
        blocks = [
            _matrix("latency in µs, from row to column", pairs, "latency", 1e6, ranks, width),
            _matrix(f"{bandwidth}, from row to column", pairs, "bandwidth", 1e-9, ranks, width),
        ]
    else:
        blocks = [_slowest(f"the {_SLOWEST} slowest of {len(pairs)} pairs, {bandwidth}", pairs, width)]
    return "\n\n".join(blocks)


def collectives_tables(collectives: results.Collectives, width: int) -> str:
    """Render times and bandwidths by size."""
    groups = collectives.groups
    title = f"{plural(len(groups), 'group')} of {plural(len(groups[0]), 'rank')}"
    if len(groups) > 1:
        title += f" ({collectives.group}), at the same time"
    table = f"{title}; every result was checked\n{_sizes(collectives.results, width)}"
    if not collectives.left_out:
        return table
    return "\n\n".join([table, wrap(f"left out, not in this backend: {', '.join(collectives.left_out)}", width)])


def _rate(bytes_per_second: float | None) -> str:
    return figure_text(bytes_per_second, lambda rate: three_digits(rate / 1e9))


def _matrix(title: str, pairs: Iterable[results.Pair], name: str, scale: float, ranks: int, width: int) -> str:
    figures = {(pair.source, pair.target): scale * getattr(pair, name) for pair in pairs}
    rows = [
        [str(source), *(figure_text(figures.get((source, target)), three_digits) for target in range(ranks))]
        for source in range(ranks)
    ]
    return f"{title}\n{drawn(['rank', *map(str, range(ranks))], rows, width, words=['rank'])}"


def _slowest(title: str, pairs: Iterable[results.Pair], width: int) -> str:
    measured = sorted(pairs, key=attrgetter("bandwidth"))
    rows = [
        [str(pair.source), str(pair.target), three_digits(1e6 * pair.latency), _rate(pair.bandwidth)]
        for pair in measured[:_SLOWEST]
    ]
    return f"{title}\n{drawn(['from', 'to', 'latency µs', 'GB/s'], rows, width)}"


def _sizes(measured: Sequence[results.CollectiveResult], width: int) -> str:
    """Return a table with a row for each operation and size; if too many, for every n-th size and the last."""
    stride = max(1, -(-len(measured) // _ROWS))
    headings = ["operation", "size", "time", "p5", "p95", "algbw GB/s", "busbw GB/s"]
    shown = []
    for name, rows in groupby(measured, key=str):
        of_series = list(rows)
        for number, row in enumerate(of_series):
            if number % stride and row is not of_series[-1]:
                continue
            times = (time_text(seconds or 0.0) for seconds in (row.seconds.median, row.seconds.p5, row.seconds.p95))
            size = size_text(row.bytes) if row.bytes else MISSING
            shown.append(["" if number else name, size, *times, _rate(row.algbw), _rate(row.busbw)])
    thinned = f"\n{len(measured)} figures, not all of them shown: the record has the rest" if stride > 1 else ""
    return f"{drawn(headings, shown, width, words=['operation'])}{thinned}"


def check_verdict(check: results.Check, width: int) -> str:
    """Render the ranks, the measurements, and last the verdict, as plain text."""
    tables = [hello_table(check.hello, width), matmul_tables(check.matmul, width)]
    return "\n\n".join(filter(None, [*tables, "\n".join(_figures(check)), "\n".join(_verdict(check, width))]))


def _figures(check: results.Check) -> Iterator[str]:
    """Yield links and collectives in a line each; their workloads show more."""
    if pairs := check.p2p.pairs if check.p2p else []:
        slowest, fastest = (choose(pairs, key=attrgetter("bandwidth")) for choose in (min, max))
        least, most = (1e6 * choose(pair.latency for pair in pairs) for choose in (min, max))
        yield (
            f"links         {fastest.bandwidth / 1e9:.3g} GB/s at most, rank {slowest.source} to rank "
            f"{slowest.target} least with {slowest.bandwidth / 1e9:.3g} GB/s; latency {least:,.0f} to "
            f"{most:,.0f} µs"
        )
    for result in check.collectives.results if check.collectives else []:
        microseconds = (result.seconds.median or 0.0) * 1e6
        yield f"{result.op:<13} {size_text(result.bytes)}: {microseconds:,.0f} µs, its result checked"


def _verdict(check: results.Check, width: int) -> Iterator[str]:
    attempts = max(check.attempts.values())
    again = f"; what looked slow was measured {attempts} times, and the best counts" if attempts > 1 else ""
    versions = {name: str(version)[:20] for name, version in check.versions.items() if version is not None}
    verdict = "sound" if check.sound else f"unsound, {plural(len(check.findings), 'finding')}"
    verdict = f"busy: {check.busy}" if check.busy else verdict
    for title, text in (
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        *(("note", remark) for remark in check.remarks),
        ("verdict", f"{verdict} (tolerance {check.tolerance:.0%}{again})"),
    ):
        yield wrap(f"{title:14}{text}", width, " " * 14)
    for finding in check.findings:
        yield wrap(f"  - {finding.text}", width, "    ")


#: The table of each workload's results, by the field of the record.
TABLES: dict[str, Callable[[Any, int], str]] = {
    "hello": hello_table,
    "matmul": matmul_tables,
    "p2p": p2p_tables,
    "collectives": collectives_tables,
    "check": check_verdict,
}
