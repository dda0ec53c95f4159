"""The lines that ``workload=collectives`` fitted to times over sizes, kept in the user's cache for later runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ptdbench import cache
from ptdbench.launch.peers import Peer

#: The folder of such measurements in the cache.
_KIND = "links"

#: How an operation was called, the way that is more like training's first.
_MODES = ("async", "blocking")

#: The figures of a line.
_FIGURES = ("alpha", "beta", "largest")

#: Operations that compute: they take longer in some dtypes than in others.
_REDUCING = ("all_reduce", "reduce_scatter")


def key(backend: str, peers: Sequence[Peer]) -> dict[str, Any]:
    """Everything that the lines depend on: they are of one group, which is all ranks.

    Args:
        backend: What communicates.
        peers: The ranks in order, with their machines and devices.
    """
    return {"backend": backend, "torch": torch.__version__, "ranks": [f"{peer.host} {peer.device}" for peer in peers]}


def keep(of: Mapping[str, Any], lines: Mapping[str, Mapping[str, float]]) -> Path:
    """Store lines that times can follow; older ones are kept of other series, and of the same up to larger sizes.

    Args:
        of: The :func:`key`.
        lines: ``alpha`` in seconds, ``beta`` in seconds a byte and ``largest``, the largest size in bytes, by the name
            of the series: operation, dtype, reduction and mode.

    Raises:
        OSError: They cannot be written.
    """
    kept = _lines(of)
    for name, line in lines.items():
        if line["alpha"] >= 0 and line["beta"] > 0 and line["largest"] >= kept.get(name, line)["largest"]:
            kept[name] = line
    return cache.keep(_KIND, of, {"lines": kept})


def seconds(of: Mapping[str, Any], operation: str, dtype: str, calls: float, size: float) -> float | None:
    """How long calls of an operation take one after the other, if all ranks take part: ``calls * alpha + size * beta``.

    Args:
        of: The :func:`key`.
        operation: Such as ``all_reduce``.
        dtype: Of what it reduces, such as ``fp32``.
        calls: Their number.
        size: Bytes of all of them.

    Returns:
        ``None`` if there is no line, or the calls are larger than what it was fitted to.
    """
    series = f"{operation} {dtype} sum" if operation in _REDUCING else f"{operation} "
    for mode in _MODES:
        for name, line in _lines(of).items():
            if name.startswith(series) and name.endswith(mode) and 0 < size <= calls * line["largest"]:
                return calls * line["alpha"] + size * line["beta"]
    return None


def _lines(of: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Those on record that are whole: a person may have changed the file."""
    found = cache.look_up(_KIND, of).get("lines")
    lines = found.items() if isinstance(found, dict) else ()
    return {name: line for name, line in lines if _is_whole(line)}


def _is_whole(line: Any) -> bool:
    return isinstance(line, dict) and all(isinstance(line.get(name), (int, float)) for name in _FIGURES)
