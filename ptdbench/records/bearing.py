"""The options of a configuration by name, and what each bears on: one table for all that compares runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ptdbench.parallel.dims import Dims

#: What options bear on besides the work; one that is not here, nor a group of it, bears on the work alone.
#: ``nothing``: no part of the work. ``start``: where, when and how often a run began. ``layout``: changes no loss.
#: ``shape``: the ranks, part of what a run is; the ``queue`` is none. ``blocks``: how many repeats there are.
#: ``degree``, ``ranks``, ``batch``: what differs between runs of one scaling curve. ``told``: a column says it already.
_OPTIONS = {
    "resume": ("nothing", "start"),
    "reshape": ("nothing", "start"),
    "repeat": ("nothing", "start"),
    **dict.fromkeys(("repeat.runs", "repeat.max", "repeat.tied_within"), ("nothing", "start", "blocks")),
    "sweep": ("nothing", "sweep"),
    "sweep.resume": ("nothing", "sweep", "start"),
    "objective": ("nothing",),
    "logger": ("nothing",),
    "cluster": ("queue", "layout"),
    "cluster.nodes": ("shape", "layout", "ranks"),
    "cluster.ranks_per_node": ("shape", "layout", "ranks", "told"),
    "cluster.gpus_per_node": ("shape", "layout", "ranks"),
    "cluster.cpus_per_rank": ("shape", "layout"),
    "parallel": ("layout", "told"),
    **dict.fromkeys(("activations", "compile", "offload", "profile", "checkpoint"), ("layout",)),
    **{f"parallel.{degree}": ("layout", "degree") for degree in Dims.rows()},
    "train.global_batch": ("batch", "told"),
    "train.micro_batch": ("batch", "layout"),
}

#: What makes a choice of a group what it is, and is no option of it.
OF_CHOICE = ("name", "label", "_target_", "_partial_")


@cache
def bears(option: str, *on: str) -> bool:
    """Return whether an option, by its dotted name, bears on any of these."""
    group = option
    while group not in _OPTIONS and group:
        group = group.rpartition(".")[0]
    return any(word in _OPTIONS.get(group, ()) for word in on)


def bearing(on: str) -> tuple[str, ...]:
    """Return the options of the table that bear on this."""
    return tuple(option for option, words in _OPTIONS.items() if on in words)


def leaves(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a configuration with their dotted names; an empty group is one of them."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
