"""What a person reads after ``workload=check``: the verdict, why, and the figures behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ptdbench.report import ceilings, roll_call
from ptdbench.terminal import plural
from ptdbench.units import size_text


def render(check: Mapping[str, Any], width: int) -> str:
    """Who was there, what was measured, and last the verdict, as plain text."""
    blocks = [
        roll_call.render(check["hello"], width),
        ceilings.render(check["matmul"], width),
        *_figures(check),
        "\n".join([*_versions(check["versions"], width), *_remarks(check, width), *_verdict(check, width)]),
    ]
    return "\n\n".join(blocks)


def remark(check: Mapping[str, Any]) -> str:
    """The verdict in a few words."""
    if check.get("busy"):
        return f"busy: {check['busy']}"
    return "sound" if check["sound"] else f"unsound, {plural(len(check['findings']), 'finding')}"


def _figures(check: Mapping[str, Any]) -> Iterator[str]:
    """Links and collectives in a line each; their workloads show more."""
    pairs = [pair for pair in (check["p2p"] or {}).get("pairs", []) if pair["bandwidth"]]
    lines = []
    if pairs:
        slowest, fastest = (choose(pairs, key=lambda pair: pair["bandwidth"]) for choose in (min, max))
        lines.append(
            f"links         {fastest['bandwidth'] / 1e9:.3g} GB/s at most, rank {slowest['source']} to rank "
            f"{slowest['target']} least with "
            f"{slowest['bandwidth'] / 1e9:.3g} GB/s; latency {min(pair['latency'] for pair in pairs) * 1e6:,.0f} to "
            f"{max(pair['latency'] for pair in pairs) * 1e6:,.0f} us"
        )
    for row in (check["collectives"] or {}).get("results", []):
        size, seconds = size_text(row["bytes"]), row["seconds"]["median"]
        lines.append(f"{row['op']:<13} {size}: {seconds * 1e6:,.0f} us, its result checked")
    if lines:
        yield "\n".join(lines)


def _versions(versions: Mapping[str, Any], width: int) -> list[str]:
    text = ", ".join(f"{name} {str(version)[:20]}" for name, version in versions.items() if version is not None)
    return [textwrap.fill(f"versions      {text}", width, subsequent_indent=" " * 14)]


def _remarks(check: Mapping[str, Any], width: int) -> Iterator[str]:
    for text in check["remarks"]:
        yield textwrap.fill(f"note          {text}", width, subsequent_indent=" " * 14)


def _verdict(check: Mapping[str, Any], width: int) -> Iterator[str]:
    attempts = max(check["attempts"].values())
    again = f"; what looked slow was measured {attempts} times, and the best counts" if attempts > 1 else ""
    text = f"verdict       {remark(check)} (tolerance {check['tolerance']:.0%}{again})"
    yield textwrap.fill(text, width, subsequent_indent=" " * 14)
    for finding in check["findings"]:
        yield textwrap.fill(finding["text"], width, initial_indent="  - ", subsequent_indent="    ")
