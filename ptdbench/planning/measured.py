"""Measured runs on GPUs, cached for plans of such GPUs; and what a plan predicted of a run that is measured later.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from msgspec import to_builtins

from ptdbench.files import from_cache, latest_in_cache, strict, to_cache
from ptdbench.records.effects import affects
from ptdbench.records.run_record import RunRecord
from ptdbench.setup.config import of_record

#: The folders in the cache: predictions by plans, and records of measured runs.
_PREDICTIONS, _RUNS = "predictions", "measured"

#: Maximum number of cached runs.
_MOST = 100

#: Options that do not affect a step, besides those that affect nothing; its ranks and device are parts of the key.
_APART = ("cluster", "virtual", "device", "memory_reserve", "timeout_minutes", "eval", "checkpoint", "profile")


def keep(run: RunRecord) -> None:
    """Cache a run that was measured on GPUs of one node, in place of an earlier one of the same work."""
    if (key := _key(run)) and run.throughput:
        with suppress(OSError):
            to_cache(_RUNS, key, {"record": strict(run.written)})
            for path in latest_in_cache(_RUNS)[_MOST:]:
                path.unlink(missing_ok=True)


def runs() -> Iterator[RunRecord]:
    """Yield the cached runs, the latest first, without those that this version cannot read."""
    for path in latest_in_cache(_RUNS):
        with suppress(OSError, KeyError, TypeError, ValueError):
            yield RunRecord.of(json.loads(path.read_text())["record"])


def keep_prediction(planned: RunRecord) -> None:
    """Cache what a plan says of a step, for when the run is measured."""
    if planned.predicted.step_seconds and (key := _key(planned)):
        with suppress(OSError):
            to_cache(_PREDICTIONS, key, {"predicted": to_builtins(planned.predicted)})


def prediction(run: RunRecord) -> dict[str, Any] | None:
    """Return what the latest plan of this work on this GPU and torch predicted of its step, if there was one."""
    key = _key(run)
    return from_cache(_PREDICTIONS, key).get("predicted") if key else None


def _key(run: RunRecord) -> dict[str, Any] | None:
    """Return what determines the time of a training step on the GPUs of one node; ``None`` for another run."""
    devices = {name.removeprefix("virtual ") for name in run.environment.devices or ()}
    if len(devices) != 1 or not run.layout.micro_batch or len(run.nodes) > 1:
        return None
    same = {"steps": 1, "warmup_steps": 0, "max_minutes": None, "global_batch": run.global_batch,
            "micro_batch": run.layout.micro_batch}  # fmt: skip
    options = of_record(run.written).changed({f"train.{name}": value for name, value in same.items()}).resolved
    kept = {name: value for name, value in options.items() if name not in _APART and not affects(name, "nothing")}
    place = {"ranks": run.world_size, "device": devices.pop(), "torch": run.environment.torch}
    return {"config": strict(kept, str), **place}
