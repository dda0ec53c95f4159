"""What the memory of a step is for, in tables and lines of figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ptdbench.measure.parts import KINDS
from ptdbench.records.schema import Memory, Phases, Written, part
from ptdbench.report import phases
from ptdbench.report.reason import wrap
from ptdbench.report.text import difference, drawn

_MEANT = (
    "MiB that torch has allocated when a step takes the most; activations: what else the forward and the backward pass "
    "allocate; communication: buffers, gathered weights included"
)

#: Peaks that differ by less, as a share of the larger one, are equal.
_EQUAL = 0.01


def of_runs(records: Mapping[str, Written], width: int) -> list[str]:
    """A table with one row a run, of the rank that takes the most; empty if no run has its memory on record."""
    rows = {}
    for called, record in records.items():
        if found := _found(record):
            peaks = _peaks(found)
            rows[called] = (record, peaks.index(max(peaks)))
    return _table("run", rows, width)


def of_ranks(record: Written, width: int) -> list[str]:
    """A table with one row a rank; of many ranks only those with the highest and the lowest peak."""
    found = _found(record)
    if not found:
        return []
    peaks = _peaks(found)
    shown = dict.fromkeys(
        range(len(peaks)) if len(peaks) <= phases.MOST_RANKS else (peaks.index(max(peaks)), peaks.index(min(peaks)))
    )
    return _table("rank", {phases.rank_name(part(record, Phases), rank): (record, rank) for rank in shown}, width)


def compare(record: Written, against: Written, called: str, reference: str) -> Iterator[str]:
    """Yield by how much one run's peak is above or below another's, and for what, if both are on record."""
    if not (_found(record) and _found(against)):
        return
    ours, theirs = (_largest(one) for one in (record, against))
    total = [sum(one.values()) for one in (ours, theirs)]
    if abs(total[0] - total[1]) <= _EQUAL * max(total):
        sizes = [f"{size / 2**20:,.{_digits(size)}f} MiB" for size in total]
        yield f"memory: {called} {sizes[0]} vs {reference} {sizes[1]}: within {_EQUAL:.0%}"
        return
    parts = {kind: (ours[kind] - theirs[kind]) / 2**20 for kind in KINDS}
    yield f"memory: {difference(called, reference, 'MiB', parts, {}, digits=3)}"


def of_largest(record: Written) -> dict[str, int] | None:
    """Bytes of each of :data:`KINDS` on the rank that takes the most; ``None`` if they are not on record."""
    return None if phases.missing(record) or not _found(record) else _largest(record)


def _found(record: Written) -> Mapping[str, Any] | None:
    """The memory of a record with phases, if it is whole, and of the same ranks."""
    found, count = part(record, Memory), len(phases.compute_seconds(part(record, Phases)))
    lists = [found.moments, *((found.ranks or {}).get(kind) for kind in KINDS)]
    return record["memory"] if all(len(one or []) == count for one in lists) else None


def _peaks(found: Mapping[str, Any]) -> list[int]:
    return [sum(amounts) for amounts in zip(*(found["ranks"][kind] for kind in KINDS), strict=True)]


def _of_rank(record: Written, rank: int) -> dict[str, int]:
    return {kind: record["memory"]["ranks"][kind][rank] for kind in KINDS}


def _largest(record: Written) -> dict[str, int]:
    """The memory of the rank that takes the most, by kind."""
    peaks = _peaks(record["memory"])
    return _of_rank(record, peaks.index(max(peaks)))


def _table(heading: str, rows: Mapping[str, tuple[Written, int]], width: int) -> list[str]:
    """One row for each rank of a record."""
    if not rows:
        return []
    amounts = {title: _of_rank(record, rank) for title, (record, rank) in rows.items()}
    kinds = [kind for kind in KINDS if any(of_rank[kind] for of_rank in amounts.values())]
    of_runs = heading == "run"
    headings, shown = [heading, "peak", *kinds, *(["rank"] if of_runs else []), "in"], []
    digits = _digits(min(sum(of_rank.values()) for of_rank in amounts.values()))
    for title, (record, rank) in rows.items():
        sizes = (sum(amounts[title].values()), *(amounts[title][kind] for kind in kinds))
        cells = [f"{size / 2**20:,.{digits}f}" for size in sizes]
        shown.append([title, *cells, *([str(rank)] if of_runs else []), record["memory"]["moments"][rank]])
    which = "; rank: the one that takes the most" if of_runs else ""
    return [drawn(headings, shown, width, words=["in"], folding=heading), wrap(_MEANT + which, width)]


def _digits(size: float) -> int:
    """Decimals of MiB that show three digits of a size, and all of one of more digits."""
    return max(0, 2 - math.floor(math.log10(abs(size) / 2**20))) if size else 0
