"""Runs that go on with other ranks, or in another layout, than their checkpoint was written with.

Any layout can take a checkpoint. What each rank has to itself it cannot always take: the random generators, and the
state of PowerSGD, so that the numbers may differ from there on, and the times are those of another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.parallel.dims import Dims
from ptdbench.problems import Problem, require
from ptdbench.setup.run_spec import Summary
from ptdbench.terminal import plural

_DEGREES = (*Dims.order(), *(name for name in Dims.rows() if name not in Dims.order()))


def change(checkpoint: Manifest, world_size: int, layout: Mapping[str, Any]) -> str | None:
    """Describe what has changed: ``2 ranks (shard=2) instead of 4 ranks (replicate=2 shard=2)``; ``None``: nothing."""
    segments = checkpoint.facts.get("segments") or [{}]
    was: Mapping[str, Any] = segments[-1].get("layout") or {}
    if checkpoint.world_size == world_size and all(was.get(name, layout[name]) == layout[name] for name in _DEGREES):
        return None
    return f"{_described(world_size, layout)} instead of {_described(checkpoint.world_size, was)}"


def require_same(directory: Path, summary: Summary, allowed: bool) -> None:
    """Raise ConfigError for a run that would go on in its place in another shape, unless that is ``allowed``."""
    if allowed or not summary.trains or (found := checkpoint_dir.latest_manifest(directory)) is None:
        return
    if changed := change(found, summary.world_size, summary.fields["layout"]):
        rule = f"{directory} would go on with {changed}, which may change its numbers"
        remedy = "start it as before, try reshape=true, or give more options for a run of its own"
        require(Problem("reshape", False, rule, remedy))


def _described(world_size: int, layout: Mapping[str, Any]) -> str:
    degrees = " ".join(f"{name}={layout[name]}" for name in _DEGREES if layout.get(name, 1) > 1)
    return plural(world_size, "rank") + (f" ({degrees})" if degrees else "")
