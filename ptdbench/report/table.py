"""Final tables: the ranking of training runs, plans, and the results of other workloads."""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from ptdbench import terminal
from ptdbench.comparison import ranking
from ptdbench.grouping import grouped
from ptdbench.launch.world import Peer
from ptdbench.measure import results
from ptdbench.profiling import perfetto
from ptdbench.records.run_record import RunRecord
from ptdbench.records.store import RECORD, RESULTS, is_sweep, read_record, read_results, write_results
from ptdbench.report import columns, text, virtual
from ptdbench.report.columns import Row, Section
from ptdbench.report.labels import names
from ptdbench.report.remarks import reason
from ptdbench.report.steps import why_no_phases
from ptdbench.report.text import MISSING, Column, drawn, figure_text, wrap
from ptdbench.terminal import command, echo, from_here, plural
from ptdbench.units import size_text, three_digits, time_text


def show_results(directory: Path) -> list[RunRecord]:
    """Print the final table of a run or a sweep, and where to read on; return its records.

    Those of a sweep are also written into one file. Nothing is printed if a signal arrived before the first run began.
    """
    if is_sweep(directory):
        records = read_results(directory, lambda damage: echo(damage, sys.stderr))
        if records:
            with suppress(OSError):  # a sweep of someone else
                write_results(directory, records)
    else:
        records = [read_record(directory)] if (directory / RECORD).exists() else []
    if records:
        width = terminal.width()
        plans = all(record.kind == "planned" for record in records)
        echo(of_plans(records, width) if plans else render(records, width))
        echo(closing_lines(directory, records))
    return records


def render(records: Sequence[RunRecord], width: int = 100) -> str:
    """Return the runs of each model as plain text, fastest first and unfinished ones last.

    Columns without a figure are omitted. If the others do not fit in ``width`` characters, the number of ranks and the
    batch move to the title if all runs have the same, the least important columns are omitted and named below, and
    words wrap; a figure is never truncated.
    """
    trained = ranking.group_runs(record for record in records if record.model)
    shown = [_of_model(section, width) for section in columns.sections(trained)]
    shown += [of_workload(record, width) for record in records if not record.model]
    return "\n\n".join(shown)


#: The file in which Hydra's Optuna sweeper writes its results.
SEARCHED = "optimization_results.yaml"


def closing_lines(directory: Path, records: Sequence[RunRecord] = ()) -> str:
    """Return where the records of a run or a sweep are, and the commands for phases, curves and a report."""
    shown = shlex.quote(str(from_here(directory)))
    of_sweep = (directory / RESULTS).exists()
    lines = [f"records      {shown}/{RESULTS if of_sweep else RECORD}"]
    if any(why_no_phases(record) is None for record in records):
        lines.append(f"phases       {command('explain')} {shown}")
    elif any(map(virtual.has_figures, records)):
        lines.append(f"memory       {command('explain')} {shown}")
    if of_sweep:
        lines.append(f"report       {command('report')} {shown}")
    if traces := [*directory.rglob(perfetto.NAME)]:
        folder = "/".join([shown, *("*" for _ in traces[0].relative_to(directory).parts[1:])])
        size = size_text(sum(path.stat().st_size for path in traces))
        lines.append(f"trace        {folder}/{perfetto.NAME} ({size})\n{'':12} (open it at https://ui.perfetto.dev)")
    if any(directory.rglob("events.*")):
        lines.append(f"TensorBoard  tensorboard --logdir {shown}")
        if of_sweep:
            lines.append("             (HPARAMS tab: sort by summary/throughput)")
    if (directory / SEARCHED).exists():
        lines.append(f"search       {shown}/{SEARCHED}")
    return "\n".join(lines)


def _of_model(section: Section, width: int) -> str:
    """Return title, table and remarks for the runs of column model; columns equal in all rows are omitted first."""
    rows, possible = section.rows, section.columns()
    repeats = any(len(row.runs) > 1 for row in rows)
    alike = {
        column.heading: column.in_title(column.cell(rows[0]))
        for column in possible
        if column.in_title and len({*map(column.cell, rows)}) == 1
    }
    shown = [column.in_table(repeats, column.heading in alike) for column in possible]
    lines, gone = text.table(shown, rows, width)
    by_place = sorted(shown, key=lambda column: column.drop_order or 0)
    spared = [column.heading for column in by_place if column.heading in gone and (column.drop_order or 0) >= 0]
    title = section.title(alike[heading] for heading in gone if heading in alike)
    below = [*text.left_out(spared, width), *(wrap(line, width) for line in (*section.remarks, *section.why))]
    return "\n".join([title, *lines, *below])


def of_plans(records: Sequence[RunRecord], width: int) -> str:
    """Return a table of the neediest rank of each plan, in GiB, with its predicted step, and with remarks below.

    Those with a predicted time come first, the fastest of them at the top.
    """
    named = dict(zip(map(id, records), names(records), strict=True))
    rows = [Row(place, named[id(place.alternative.runs[0])]) for place in ranking.rank_predicted(records)]
    is_timed = any(row.place.rate for row in rows)
    of_memory = [columns.planned(heading, lambda size: three_digits(size / 2**30)) for heading in virtual.PLANNED]
    if is_timed:
        beside = virtual.BESIDE_TIMES
        of_memory = [replace(column, drop_order=beside.get(column.heading, column.drop_order)) for column in of_memory]
    possible: list[Column[Row]] = [
        Column("layout", attrgetter("name"), is_text=True),
        Column("ranks", lambda row: str(row.run.world_size or MISSING), drop_order=5 if is_timed else None),
        *columns.PREDICTED,
        *of_memory,
    ]
    shown = [column for column in possible if any(column.cell(row) != MISSING for row in rows)]
    lines, gone = text.table(shown, rows, width)
    models = ", ".join(dict.fromkeys(str(record.model) for record in records))
    lacking = grouped((lack, row.name) for row in rows if (lack := _lack(row.run)))
    remarks = [*(f"{', '.join(whose)}: {lack}" for lack, whose in lacking.items()), *virtual.of_plans(records)]
    timed = " · times predicted, not measured" if is_timed else ""
    lines = [f"{models} · planned, GiB on the most heavily loaded rank{timed}", *lines, *text.left_out(gone, width)]
    return "\n".join([*lines, *(wrap(line, width) for line in dict.fromkeys(remarks))])


def _lack(plan: RunRecord) -> str | None:
    """Return why a plan does not fit, is of the training state alone, or has no time; ``None`` if it is whole."""
    if plan.status != "ok":
        return reason(plan)
    if plan.plan.reason:
        return f"only the training state is known: {plan.plan.reason}"
    return f"no predicted time: {plan.predicted.reason}" if plan.predicted.reason else None


def of_workload(record: RunRecord, width: int) -> str:
    """Render the result of a workload that does not train, even if it failed, or why there is none.

    Results of a workload from outside ptdbench are shown as recorded: the code that a record names is not run.
    """
    if record.workload == "program":
        return virtual.of_program(record, width)
    recorded = record.written.get(record.workload)
    lines = [_results(recorded, record.workload, width)] if recorded else []
    if record.status == "ok" and not lines:
        without = f"ok, without a result to show: its outcome has no field {record.workload}"
        lines.append(wrap(f"{record.workload}: {without}", width))
    elif record.status != "ok" and not (lines and record.error.type in ("Busy", "Unsound")):  # the verdict says it
        lines.append(wrap(f"{record.workload}: {reason(record)}", width))
    return "\n".join(lines)


def _results(recorded: object, workload: str, width: int) -> str:
    if workload in _TABLES:
        with suppress(ValidationError):  # of another workload with this name
            return _TABLES[workload](getattr(convert({workload: recorded}, results.Findings), workload), width)
    return _as_recorded(recorded)


#: Maximum lines of third-party results to show, and characters of each.
_MOST_LINES, _LONGEST = 60, 200


def _as_recorded(recorded: object) -> str:
    lines = json.dumps(recorded, indent=1).splitlines()
    shown = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…" for line in lines[:_MOST_LINES]]
    left_out = len(lines) - len(shown)
    return "\n".join([*shown, *([f"… and {left_out:,} lines more in {RECORD}"] if left_out else [])])


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
    return "\n".join([title, table, *_settings_of_ranks(hello.ranks)])


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 3, 8]`` becomes ``0-3,8``."""
    alike = groupby(enumerate(sorted(numbers)), lambda placed: placed[1] - placed[0])  # constant in a range
    parts = [[number for _, number in part] for _, part in alike]
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _settings_of_ranks(ranks: Sequence[Peer]) -> Iterator[str]:
    """Yield a line for each variable, or one for each of its values if they differ between ranks."""
    for name in sorted({name for rank in ranks for name in rank.settings}):
        by_value = grouped((rank.settings.get(name, "(not set)"), rank.rank) for rank in ranks)
        for value, having in by_value.items():
            where = "" if len(by_value) == 1 else f"  (rank{'s' * (len(having) > 1)} {ranges(having)})"
            yield f"{name}={value}{where}"


#: Headings of the columns from :func:`_rates`.
_RATES = ("mean", "median", "maximum", "slowest rank", "repeated")


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
        rows.append([dtype, shape + " (best)" * ((dtype, shape) in best), *_rates(of_ranks)])
    return drawn(["dtype", "shape", *_RATES], rows, width, words=["dtype", "shape"])


def _rates(of_ranks: Sequence[results.Product]) -> list[str]:
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
_MOST_ROWS = 60

#: Maximum number of ranks for a matrix of pairs; with more, only the slowest pairs are shown.
_MOST_RANKS = 8
_SLOWEST_PAIRS = 10


def p2p_tables(p2p: results.P2P, width: int) -> str:
    """Render latency and bandwidth by pair."""
    pairs = p2p.pairs
    ranks = 1 + max(max(pair.source, pair.target) for pair in pairs)
    largest = max((size.bytes for pair in pairs for size in pair.sizes), default=0)
    bandwidth = f"bandwidth at {size_text(largest)} in GB/s"
    if ranks <= _MOST_RANKS:
        blocks = [
            _matrix("latency in µs, from row to column", pairs, "latency", 1e6, ranks, width),
            _matrix(f"{bandwidth}, from row to column", pairs, "bandwidth", 1e-9, ranks, width),
        ]
    else:
        blocks = [_slowest(f"the {_SLOWEST_PAIRS} slowest of {len(pairs)} pairs, {bandwidth}", pairs, width)]
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


def _gigabytes(bytes_per_second: float | None) -> str:
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
        [str(pair.source), str(pair.target), three_digits(1e6 * pair.latency), _gigabytes(pair.bandwidth)]
        for pair in measured[:_SLOWEST_PAIRS]
    ]
    return f"{title}\n{drawn(['from', 'to', 'latency µs', 'GB/s'], rows, width)}"


def _sizes(measured: Sequence[results.CollectiveResult], width: int) -> str:
    """Return a table with a row for each operation and size; if too many, for every n-th size and the last."""
    stride = max(1, -(-len(measured) // _MOST_ROWS))
    headings = ["operation", "size", "time", "p5", "p95", "algbw GB/s", "busbw GB/s"]
    shown = []
    for name, rows in groupby(measured, key=str):
        of_series = list(rows)
        for number, row in enumerate(of_series):
            if number % stride and row is not of_series[-1]:
                continue
            times = (time_text(seconds or 0.0) for seconds in (row.seconds.median, row.seconds.p5, row.seconds.p95))
            size = size_text(row.bytes) if row.bytes else MISSING
            shown.append(["" if number else name, size, *times, _gigabytes(row.algbw), _gigabytes(row.busbw)])
    thinned = f"\n{len(measured)} figures, not all of them shown: the record has the rest" if stride > 1 else ""
    return f"{drawn(headings, shown, width, words=['operation'])}{thinned}"


def check_verdict(check: results.Check, width: int) -> str:
    """Render the ranks, the measurements, and last the verdict, as plain text."""
    tables = [hello_table(check.hello, width), matmul_tables(check.matmul, width)]
    return "\n\n".join(
        filter(None, [*tables, "\n".join(_links_and_collectives(check)), "\n".join(_verdict(check, width))])
    )


def _links_and_collectives(check: results.Check) -> Iterator[str]:
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
    for title, words in (
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        *(("note", remark) for remark in check.remarks),
        ("verdict", f"{verdict} (tolerance {check.tolerance:.0%}{again})"),
    ):
        yield wrap(f"{title:14}{words}", width, " " * 14)
    for finding in check.findings:
        yield wrap(f"  - {finding.text}", width, "    ")


#: The table of each workload's results, by the field of the record.
_TABLES: dict[str, Callable[[Any, int], str]] = {
    "hello": hello_table,
    "matmul": matmul_tables,
    "p2p": p2p_tables,
    "collectives": collectives_tables,
    "check": check_verdict,
}
