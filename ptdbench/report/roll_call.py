"""The table of ``workload=hello``: where every rank is, and under which settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptdbench.report.text import drawn
from ptdbench.terminal import plural


def render(hello: Mapping[str, Any], width: int) -> str:
    """The ranks of one run as plain text."""
    ranks = hello["ranks"]
    nodes = len({rank["node"] for rank in ranks})
    title = (
        f"{plural(len(ranks), 'rank')} on {plural(nodes, 'node')}, "
        f"started by {hello['launcher']}, over {hello['backend']} at {hello['address']}:{hello['port']}"
    )
    words = ("node", "host", "device", "cores")
    rows = [
        [
            str(rank["rank"]), str(rank["local_rank"]), str(rank["local_size"]), rank["node"], rank["host"],
            rank["device"], ranges(rank["cores"]), str(rank["threads"]),
        ]
        for rank in ranks
    ]  # fmt: skip
    table = drawn(["rank", "local", "of", *words, "threads"], rows, width, words=words)
    return "\n".join([title, table, *_settings(ranks)])


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 3, 8]`` becomes ``0-3,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _settings(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each variable, and one for each value where the ranks have different ones."""
    for name in sorted({name for rank in ranks for name in rank["settings"]}):
        by_value: dict[str, list[int]] = {}
        for rank in ranks:
            by_value.setdefault(rank["settings"].get(name, "(not set)"), []).append(rank["rank"])
        for value, having in by_value.items():
            where = "" if len(by_value) == 1 else f"  (rank{'s' * (len(having) > 1)} {ranges(having)})"
            yield f"{name}={value}{where}"
