"""What each option of a configuration affects: one table for everything that compares runs."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from ptdbench.parallel.dims import Dims

#: What options affect besides the work; an option that is listed neither itself nor by its group affects only the work.
#: ``nothing``: not part of the work. ``start``: where, when and how often a run started. ``layout``: changes no loss.
#: ``shape``: the ranks, which identify a run, unlike the ``queue``. ``blocks``: the number of repeats.
#: ``degree``, ``ranks``, ``batch``: differ between the runs of a scaling curve. ``told``: shown in a column already.
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
    **dict.fromkeys(("activations", "compile", "kernels", "offload", "profile", "checkpoint"), ("layout",)),
    **{f"parallel.{degree}": ("layout", "degree") for degree in Dims.rows()},
    "train.global_batch": ("batch", "told"),
    "train.micro_batch": ("batch", "layout"),
}

#: What runs used whose records are from versions without these options.
EARLIER = {"kernels": "fused"}

#: Keys that identify a group's choice and are not options.
OF_CHOICE = ("name", "label", "_target_", "_partial_")


@cache
def affects(option: str, *on: str) -> bool:
    """Return whether an option, by its dotted name, affects any of these."""
    group = option
    while group not in _OPTIONS and group:
        group = group.rpartition(".")[0]
    return any(word in _OPTIONS.get(group, ()) for word in on)


def options_affecting(on: str) -> tuple[str, ...]:
    """Return the options in the table that affect this."""
    return tuple(option for option, words in _OPTIONS.items() if on in words)


def leaves(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a configuration with their dotted names; an empty group is one of them."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def short_names(options: Collection[str]) -> dict[str, str]:
    """Shorten each option to the last part of its name, if that is unique among them."""
    counts = Counter(name.rpartition(".")[2] for name in options)
    return {name: last if counts[last := name.rpartition(".")[2]] == 1 else name for name in options}
