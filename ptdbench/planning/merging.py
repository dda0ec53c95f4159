"""One record of a run whose ranks were carried out a few at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The fields of ``virtual`` with a number for each rank.
_OF_RANKS = ("ranks", "allocated_bytes", "reserved_bytes", "communicators", "host_seconds")


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of all ranks; each of the records is of other ranks, in ascending order."""
    first = dict(records[0])
    if len(records) == 1:
        return first
    virtual = [record["virtual"] for record in records]
    known = [name for name in _OF_RANKS if virtual[0][name] is not None]
    first["virtual"] = virtual[0] | {name: [n for one in virtual for n in one[name]] for name in known}
    first["virtual"] |= {"kernels": _lists(virtual, "kernels"), "messages": _messages(virtual)}
    first["virtual"]["reason"] = next((one["reason"] for one in virtual if one.get("reason")), None)
    memory: list[Any] = [record.get("memory") for record in records]
    if all(one and not one.get("reason") for one in memory):
        first["memory"] = {
            **memory[0],
            "ranks": _lists(memory, "ranks"),
            "moments": [word for one in memory for word in one["moments"]],
            "pass_seconds": sum(one["pass_seconds"] for one in memory),
        }
    metrics = [record["metrics"] for record in records]
    peaks = {name: max(one[name] for one in metrics) for name in ("peak_memory_bytes", "peak_reserved_bytes")}
    first["metrics"] = metrics[0] | peaks
    return first


def _lists(parts: Sequence[Any], name: str) -> dict[str, list[int]]:
    """A list for each kind that some part has, with zeros for those that have it not."""
    kinds = dict.fromkeys(kind for part in parts for kind in part[name])
    sizes = [len(part.get("ranks") if name == "kernels" else part["moments"]) for part in parts]
    return {
        kind: [n for part, size in zip(parts, sizes, strict=True) for n in part[name].get(kind, [0] * size)]
        for kind in kinds
    }


def _messages(parts: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The mean over ranks of each operation; bytes are known if they are of all ranks that call it."""
    total = sum(len(part["ranks"]) for part in parts)
    found = {}
    for operation in dict.fromkeys(name for part in parts for name in part["messages"]):
        have = [(part["messages"][operation], len(part["ranks"])) for part in parts if operation in part["messages"]]
        known = all(one["bytes"] is not None for one, _ in have)
        found[operation] = {
            "calls": sum(one["calls"] * count for one, count in have) / total,
            "bytes": sum(one["bytes"] * count for one, count in have) / total if known else None,
            "formula_bytes": next((one["formula_bytes"] for one, _ in have if one["formula_bytes"] is not None), None),
        }
    return found
