"""How throughput grows with the number of ranks: one curve for all rows that differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ptdbench.records.bearing import bearing, bears

Row = Mapping[str, Any]


def curves(rows: Iterable[Row], options: Mapping[str, Sequence[str | None]]) -> list[dict[str, Any]]:
    """Strong scaling, where the global batch stays, and weak scaling, where the batch of a rank does.

    Args:
        rows: Those of one model; only the ones with throughput count.
        options: The varying options, with a value for each row by its number.

    Returns:
        ``kind`` (``strong`` or ``weak``), ``name``, ``rows`` by their numbers, from the fewest ranks to the most, and
        ``efficiency``: for each the throughput of a rank over that of a rank of the first one. Of each kind the curve
        with the highest throughput comes first.
    """
    kept = [name for name in options if not _is_of_size(name)]
    known = [row for row in rows if row["rate"] and row["ranks"] and row["batch"]]
    found = []
    for kind, size in (("strong", lambda row: row["batch"]), ("weak", lambda row: row["batch"] / row["ranks"])):
        alike = _grouped(
            known, lambda row, size=size: (size(row), row["parallel"], *(options[name][row["number"]] for name in kept))
        )
        curves = [curve for group in alike for curve in _apart(group, options)]
        curves = sorted((one for one in curves if len(one) > 1), key=lambda one: -max(row["rate"] for row in one))
        found += [_curve(kind, curve, size(curve[0]), options) for curve in curves]
    return found


def _is_of_size(option: str) -> bool:
    """Whether an option says on how many ranks a run is, how they are divided, or how the batch is."""
    return bears(option, "degree", "ranks", "batch")


def _apart(group: Sequence[Row], options: Mapping[str, Sequence[str | None]]) -> Iterable[Sequence[Row]]:
    """Curves with one row for each number of ranks, as few as will do.

    They are divided by degrees, by micro-batches, by nodes and by sweeps, in this order, as long as a curve has two
    rows for a number of ranks; of what still has, the faster one counts.
    """

    def values(*names: str) -> Callable[[Row], Hashable]:
        return lambda row: tuple(options[name][row["number"]] for name in names if name in options)

    waiting = [list(group)]
    for key in (
        values(*bearing("degree")),
        values(*bearing("batch")),
        lambda row: row["nodes"],
        lambda row: row["sweep"],
    ):
        parts = [(one, _grouped(one, key)) for one in waiting]
        waiting = [part for one, divided in parts for part in ([one] if _is_curve(one) else _useful(divided, one))]
    for one in waiting:
        fastest = {row["ranks"]: row for row in sorted(one, key=lambda row: row["rate"])}
        yield [fastest[ranks] for ranks in sorted(fastest)]


def _is_curve(rows: Sequence[Row]) -> bool:
    return len({row["ranks"] for row in rows}) == len(rows)


def _useful(divided: list[list[Row]], whole: list[Row]) -> list[list[Row]]:
    """The parts, unless none of them has two numbers of ranks: then it is no division of curves."""
    return divided if any(len({row["ranks"] for row in part}) > 1 for part in divided) else [whole]


def _grouped(rows: Iterable[Row], key: Any) -> list[list[Row]]:
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _curve(kind: str, rows: Sequence[Row], size: float, options: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
    first = rows[0]["rate"] / rows[0]["ranks"]
    batch = f"batch {size:g}" if kind == "strong" else f"{size:g} a rank"
    varying = [name for name in options if not _is_of_size(name) and name != "parallel"]
    words = [f"{name.rpartition('.')[2]}={text}" for name in varying if (text := options[name][rows[0]["number"]])]
    return {
        "kind": kind,
        "name": ", ".join([" ".join([str(rows[0]["parallel"]), *words]), batch]),
        "rows": [row["number"] for row in rows],
        "efficiency": [row["rate"] / row["ranks"] / first for row in rows],
    }
