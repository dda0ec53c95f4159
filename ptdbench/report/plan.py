"""What ``ptdbench plan`` found, as a table with a row for each layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptdbench.report.labels import names
from ptdbench.report.remarks import reason
from ptdbench.report.text import fitted, lines, wrap
from ptdbench.report.virtual import of_experts
from ptdbench.units import gib_text, three_digits

Record = Mapping[str, Any]

#: Columns that are left out where there is no room, the first one first.
_SPARED = ("of GPU", "other", "outside", "gradients", "rank", "allocated", "optimizer", "weights")

#: The kinds of memory of a step by their columns.
_KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "gathered": "communication",
    "other": "other",
}


def table(records: Sequence[Record], width: int) -> str:
    """Of each plan the rank that needs most, in GiB, and below what to know of it."""
    called = names(records)
    rows = [_row(name, record) for name, record in zip(called, records, strict=True)]
    headings = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    cells = [[row[name] for name in headings] for row in rows]
    widths = fitted(headings, cells, width, {}, _SPARED)
    left_out = [name for name in headings if name not in widths]
    models = ", ".join(dict.fromkeys(str(record.get("model")) for record in records))
    told = [f"{models} · planned, GiB of the rank that needs most", *lines(headings, cells, widths, {"layout", "fits"})]
    if left_out:
        told.append(f"left out in {width} columns: {', '.join(left_out)}")
    return "\n".join([*told, *(wrap(line, width) for line in dict.fromkeys(_remarks(called, records)))])


def _row(name: str, record: Record) -> dict[str, str]:
    plan, layout = record.get("plan") or {}, record.get("layout") or {}
    kinds, virtual = (record.get("memory") or {}).get("ranks") or {}, record.get("virtual") or {}
    place = virtual["ranks"].index(plan["rank"]) if plan.get("rank") is not None else None
    state: Mapping[str, int] = max(plan.get("state") or [], key=lambda one: sum(one.values()), default={})

    def of_kind(column: str) -> int | None:
        if place is not None and _KINDS[column] in kinds:
            return int(kinds[_KINDS[column]][place])
        return state.get(column)

    room, needed = plan.get("room_bytes"), plan.get("needed_bytes")
    outside = sum(plan["outside"].values()) if plan.get("outside") else None
    largest = plan.get("largest_micro_batch")
    return {
        "layout": name,
        "ranks": str(record.get("world_size") or "-"),
        "mb": str(layout.get("micro_batch") or "-"),
        "rank": str(plan.get("rank", "-") if place is not None else "-"),
        **{column: _gib(of_kind(column)) for column in _KINDS},
        "allocated": _gib(plan.get("allocated_bytes")),
        "reserved": _gib(plan.get("reserved_bytes")),
        "outside": _gib(outside),
        "of GPU": _gib(plan.get("capacity_bytes")),
        "left": _gib(None if room is None or needed is None else room - needed),
        "fits": _fits(record, plan),
        "max mb": "-" if largest is None else str(largest or "none"),
    }


def _fits(record: Record, plan: Mapping[str, Any]) -> str:
    if not plan:
        return "failed"
    return {True: "yes", False: "no"}.get(plan.get("fits"), "?")  # type: ignore[arg-type]


def _gib(size: int | None) -> str:
    return "-" if size is None else three_digits(size / 2**30)


def _remarks(called: Sequence[str], records: Sequence[Record]) -> Iterator[str]:
    """Why rows do not fit, what others are for, and what the figures are."""
    alike: dict[str, list[str]] = {}
    for name, record in zip(called, records, strict=True):
        if record["status"] != "ok":
            alike.setdefault(reason(record), []).append(name)
        elif why := (record.get("plan") or {}).get("reason"):
            alike.setdefault(f"only the training state is known: {why}", []).append(name)
    yield from (f"{', '.join(whose)}: {said}" for said, whose in alike.items())
    virtual = [record for record in records if (record.get("plan") or {}).get("stands_for")]
    for plan in (record["plan"] for record in virtual):  # one line of those that are the same
        yield (
            f"left: of {gib_text(plan['room_bytes'])} of {gib_text(plan['capacity_bytes'])} ({plan['capacity_of']}), "
            "after what torch reserves, the CUDA context and NCCL's buffers, the latter two by estimate"
        )
    if virtual:
        yield (
            "gathered: weights that FSDP has gathered, and buffers of communication; max mb: the largest micro-batch "
            "that fits; carried out: " + "; ".join(dict.fromkeys(map(_stands_for, virtual)))
        )
    yield from (line for record in records if record.get("virtual") for line in of_experts(record))
    for plan in (record.get("plan") or {} for record in records):
        if plan.get("capacity_bytes") and plan.get("reason"):
            yield f"memory: {plan['capacity_of']}"


def _stands_for(record: Record) -> str:
    """``rank 0 of 8``, ``ranks 0, 64 (each for 64), ... of 256``."""
    pairs = zip(record["virtual"]["ranks"], record["plan"]["stands_for"], strict=True)
    told = ", ".join(f"{rank} for {count}" if count > 1 else str(rank) for rank, count in pairs)
    return f"{told} of {record.get('world_size')} ranks"
