"""What runs are called beside each other: how each is parallelized, and as much else as it takes to tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ptdbench.parallel.dims import Dims
from ptdbench.records.alternatives import sweep_of
from ptdbench.records.record import option
from ptdbench.records.schema import Layout, Written, part
from ptdbench.report.differences import differences
from ptdbench.terminal import plural

#: More words on a run, nothing where they are not known; ``None`` stands for the options that differ.
_Detail = Callable[[Written], str] | None


def labels(records: Sequence[Written]) -> list[str]:
    """How each run of one model is parallelized, for a table with columns for the ranks and the global batch.

    ``pdp 2x4 1f1b`` is 2 replicas of 4 stages, ``hsdp 2x8`` 2 replicas in 8 shards each.
    """
    shown = [(record.get("world_size"), record.get("global_batch")) for record in records]
    return _told_apart(records, [_parallel(record) for record in records], [*_DETAILS, *_PLACES], shown)


def names(records: Sequence[Written]) -> list[str]:
    """The labels of runs of one model for lines of text, which have no columns for the ranks and the global batch."""
    return _told_apart(records, [_parallel(record) for record in records], [*_DETAILS, *_PLACES], [()] * len(records))


def titles(records: Sequence[Written]) -> list[str]:
    """What each run is called in the display of its sweep, where it stands alone: ``gpt_tiny pdp gpipe b16``.

    Model and preset, or the workload of a run without a model, then what differs between runs of the same name.
    Records of runs that have not begun will do.
    """
    return _told_apart(records, [name(record) for record in records], _DETAILS, [()] * len(records))


def _told_apart(
    records: Sequence[Written], names: list[str], details: Sequence[_Detail], shown: Sequence[tuple[Any, ...]]
) -> list[str]:
    """The names, with one detail after the other for runs that look the same without it."""
    for detail in details:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place, looks in enumerate(zip(names, shown, strict=True)):
            alike.setdefault(looks, []).append(place)
        for places in alike.values():
            same = [records[place] for place in places]
            words = [detail(record) for record in same] if detail else differences(same)
            if len(set(filter(None, words))) > 1:
                for place, text in zip(places, words, strict=True):
                    names[place] = f"{names[place]} {text}".rstrip()
    return names


def name(record: Written) -> str:
    """A run in a word or two: model and preset, or the workload of one without a model."""
    named = " ".join(str(record[part]) for part in ("model", "parallel") if record.get(part))
    return named or str(record.get("workload"))


def _parallel(record: Written) -> str:
    """The preset, with its degrees if there are several and its schedule if there is one."""
    return " ".join(filter(None, (str(record.get("parallel")), _degrees(record), _schedule(record))))


def _degrees(record: Written) -> str:
    layout = part(record, Layout)
    above = {name: degree for name in Dims.rows() if (degree := getattr(layout, name) or 1) > 1}
    if {*above} - {"replicate", "shard", "pipeline"}:  # too many for an order to be known by heart
        return " ".join(f"{Dims.rows()[name].letter}{degree}" for name, degree in above.items())
    if "pipeline" not in above and len(above) < 2:
        return ""
    return "x".join(map(str, ({"replicate": 1} | above).values()))


def _schedule(record: Written) -> str:
    if (part(record, Layout).pipeline or 1) == 1:
        return ""
    return Path(option(record, "parallel.schedule", str) or "").name


def _nodes(record: Written) -> str:
    """How many there were, or else should have been; nothing where neither is known."""
    nodes = len(record.get("nodes") or []) or option(record, "cluster.nodes", int)
    return plural(nodes, "node") if nodes else ""


#: What tells runs apart, the first one first; what a name says already tells none apart.
_DETAILS: tuple[_Detail, ...] = (
    _schedule,
    lambda record: plural(record["world_size"], "rank") if record.get("world_size") else "",
    _degrees,
    lambda record: f"b{record['global_batch']}" if record.get("global_batch") else "",
    _nodes,
    lambda record: str(record.get("precision")),
    lambda record: f"m{part(record, Layout).microbatches or 1}",
    lambda record: f"acc{part(record, Layout).accumulation or 1}",
    None,
)

#: The same for runs of several sweeps.
_PLACES: tuple[_Detail, ...] = (
    lambda record: f"[{sweep_of(record).name}]",
    lambda record: f"[{Path(record['directory']).name}]",
    lambda record: f"[{record['directory']}]",
)
