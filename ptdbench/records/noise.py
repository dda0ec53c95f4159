"""How much runs of the same configuration differ on a machine: kept in the user's cache by sweeps with repeats.

A table of single runs shows no order that this would turn round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ptdbench import cache
from ptdbench.measure import comparison
from ptdbench.measure.comparison import Spread
from ptdbench.records.alternatives import Alternative

#: The folder of such measurements in the cache.
_KIND = "noise"

#: Fewer degrees of freedom say too little of a machine: two configurations with three runs each have four.
_LEAST = 4


def keep(found: Sequence[Alternative]) -> None:
    """Store how much the runs of each alternative of a sweep differ, if there are enough; a full disk is no failure."""
    if all(len(one.sample) < comparison.LEAST for one in found):
        return
    spread = comparison.spread_of([one.sample for one in found])
    if spread and spread.freedom >= _LEAST:
        with suppress(OSError):
            machine = _machine([one.typical for one in found])
            cache.keep(_KIND, machine, {"deviation": spread.deviation, "freedom": spread.freedom})


def look_up(runs: Sequence[Mapping[str, Any]]) -> Spread | None:
    """What was last found on the machines of some runs."""
    found = cache.look_up(_KIND, _machine(runs))
    deviation, freedom = found.get("deviation"), found.get("freedom")
    if isinstance(deviation, float) and isinstance(freedom, int) and 0 < deviation < math.inf and freedom >= _LEAST:
        return Spread(deviation, freedom)
    return None


def _machine(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """That of the first run that is ok: one that failed early may have learned of none."""
    run = next((run for run in runs if run["status"] == "ok"), runs[0])
    environment = run.get("environment") or {}
    return {"nodes": run.get("nodes"), **{name: environment.get(name) for name in ("cpu", "cores", "devices")}}
