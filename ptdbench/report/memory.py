"""What the memory of a step is for, in tables and sentences made of the figures on record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ptdbench.report import phases
from ptdbench.report.phases import Record
from ptdbench.report.reason import wrap
from ptdbench.report.text import as_text, empty_table

#: What memory is for, as :mod:`ptdbench.measure.allocations` tells it apart, and what a sentence calls it.
KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "communication": "buffers of communication",
    "other": "other memory",
}

_MEANT = (
    "MiB that torch has allocated when a step takes the most; activations: what else the forward and the backward pass "
    "allocate; communication: buffers, gathered weights included"
)

#: Peaks that differ by less, as a share of the larger one, are equal.
_EQUAL = 0.01

#: A kind that makes up less of the difference between two peaks is not named.
_NAMED = 0.1


def of_runs(records: Mapping[str, Record], width: int) -> list[str]:
    """A table with one row a run, of the rank that takes the most; empty if no run has its memory on record."""
    rows = {}
    for called, record in records.items():
        if found := _found(record):
            peaks = _peaks(found)
            rows[called] = (record, peaks.index(max(peaks)))
    return _table("run", rows, width)


def of_ranks(record: Record, width: int) -> list[str]:
    """A table with one row a rank; of many ranks only those with the highest and the lowest peak."""
    found = _found(record)
    if not found:
        return []
    peaks = _peaks(found)
    shown = dict.fromkeys(
        range(len(peaks)) if len(peaks) <= phases.MOST_RANKS else (peaks.index(max(peaks)), peaks.index(min(peaks)))
    )
    return _table("rank", {phases.rank_name(record["phases"], rank): (record, rank) for rank in shown}, width)


def compare(record: Record, against: Record, called: str, reference: str) -> Iterator[str]:
    """A sentence on how much more or less memory the peak of one run takes than that of another, and for what.

    The parts that it names add up to the difference, as they are printed. Nothing if either is not on record.

    Args:
        record: The run that the sentence is about.
        against: The other run.
        called: What the run is called.
        reference: What the other one is called.
    """
    if not (_found(record) and _found(against)):
        return
    ours, theirs = (_largest(one) for one in (record, against))
    total = [sum(one.values()) for one in (ours, theirs)]
    difference = total[0] - total[1]
    if abs(difference) < _EQUAL * max(total):
        took = " and ".join(_mebibytes(size, _digits(size)) for size in total)
        yield f"{called} and {reference} take equally much memory: {took} at the peak"
        return
    digits = _digits(difference)
    changes = {KINDS[kind]: ours[kind] - theirs[kind] for kind in KINDS}
    named = {name: size for name, size in changes.items() if abs(size) >= _NAMED * abs(difference)}
    said = [f"{_signed(named[name], digits)} {name}" for name in sorted(named, key=lambda name: -abs(named[name]))]
    rest = _rounded(difference, digits) - sum(_rounded(size, digits) for size in named.values())
    if round(rest, digits):
        said.append(f"{_signed(rest * 2**20, digits)} for all else")
    yield f"{called} takes {_signed(difference, digits)} memory at the peak than {reference}: {', '.join(said)}"


def of_largest(record: Record) -> list[int] | None:
    """Bytes of each of :data:`KINDS` on the rank that takes the most; ``None`` if they are not on record."""
    return None if phases.missing(record) or not _found(record) else list(_largest(record).values())


def _found(record: Record) -> Mapping[str, Any] | None:
    """The memory of a record with phases, if it is whole, and of the same ranks."""
    found = record.get("memory") or {}
    ranks, moments = found.get("ranks") or {}, found.get("moments") or []
    count = len(phases.compute_seconds(record["phases"]))
    return found if len(moments) == count and all(len(ranks.get(kind) or []) == count for kind in KINDS) else None


def _peaks(found: Mapping[str, Any]) -> list[int]:
    return [sum(amounts) for amounts in zip(*(found["ranks"][kind] for kind in KINDS), strict=True)]


def _of_rank(record: Record, rank: int) -> dict[str, int]:
    return {kind: record["memory"]["ranks"][kind][rank] for kind in KINDS}


def _largest(record: Record) -> dict[str, int]:
    """The memory of the rank that takes the most, by kind."""
    peaks = _peaks(record["memory"])
    return _of_rank(record, peaks.index(max(peaks)))


def _table(heading: str, rows: Mapping[str, tuple[Record, int]], width: int) -> list[str]:
    """One row for each rank of a record."""
    if not rows:
        return []
    amounts = {title: _of_rank(record, rank) for title, (record, rank) in rows.items()}
    kinds = [kind for kind in KINDS if any(of_rank[kind] for of_rank in amounts.values())]
    of_runs = heading == "run"
    table = empty_table(heading, "peak", *kinds, *(["rank"] if of_runs else []), "in", words=["in"], folding=heading)
    digits = _digits(min(sum(of_rank.values()) for of_rank in amounts.values()))
    for title, (record, rank) in rows.items():
        sizes = (sum(amounts[title].values()), *(amounts[title][kind] for kind in kinds))
        cells = [f"{size / 2**20:,.{digits}f}" for size in sizes]
        table.add_row(title, *cells, *([str(rank)] if of_runs else []), record["memory"]["moments"][rank])
    which = "; rank: the one that takes the most" if of_runs else ""
    return [as_text(table, width), wrap(_MEANT + which, width)]


def _digits(size: float) -> int:
    """Decimals of MiB that show three digits of a size, and all of one of more digits."""
    return max(0, 2 - math.floor(math.log10(abs(size) / 2**20))) if size else 0


def _rounded(size: float, digits: int) -> float:
    return round(size / 2**20, digits)


def _mebibytes(size: float, digits: int) -> str:
    return f"{abs(size) / 2**20:,.{digits}f} MiB"


def _signed(size: float, digits: int) -> str:
    return f"{_mebibytes(size, digits)} {'more' if size > 0 else 'less'}"
