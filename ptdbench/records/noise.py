"""How much runs of the same configuration differ: kept in the user's cache by sweeps with repeats.

A table of single runs shows no order that this would turn round. Long runs differ less than short ones, and a large
model less than a small one, so that it holds for runs of the same size on the same machine alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ptdbench import cache
from ptdbench.measure import comparison
from ptdbench.measure.comparison import LEAST, Spread
from ptdbench.records.alternatives import Alternative
from ptdbench.records.record import option

#: The folder of such measurements in the cache.
_KIND = "noise"

#: Fewer degrees of freedom say too little: two alternatives with three runs each have four.
_LEAST_FREEDOM = 4


def keep(found: Sequence[Alternative]) -> None:
    """Store how much the runs of a sweep differ, for each size of runs of which there are enough.

    What is stored is the deviation of the alternative whose runs differ most: pooled with quiet ones it would be too
    small for that one. The largest of several is rather too large than too small, so it has the degrees of freedom of
    all. Of single runs with deviations of 1 %, 1 % and 5 % that shows a false order in 4 of 100 tables after three
    runs each, the pooled one in 10. A full disk is no failure.

    Args:
        found: The alternatives of the sweep.
    """
    groups: dict[str, list[Alternative]] = {}
    for one in found:
        if len(one.sample) >= LEAST:
            groups.setdefault(json.dumps(_key(one.typical), sort_keys=True), []).append(one)
    for group in groups.values():
        spreads = [spread for one in group if (spread := comparison.spread_of([one.sample]))]
        freedom = sum(spread.freedom for spread in spreads)
        if freedom >= _LEAST_FREEDOM:
            deviation = max(spread.deviation for spread in spreads)
            with suppress(OSError):
                cache.keep(_KIND, _key(group[0].typical), {"deviation": deviation, "freedom": freedom})


def look_up(runs: Iterable[Mapping[str, Any]]) -> Spread | None:
    """What was last found of runs as large as these on their machine.

    Args:
        runs: Those that will be compared; only the ones that are ok count.

    Returns:
        Of runs of several sizes that of the size whose runs differ most; ``None`` if one of them is not known.
    """
    keys = {json.dumps(key := _key(run), sort_keys=True): key for run in runs if run["status"] == "ok"}
    spreads = [_known(key) for key in keys.values()]
    known = [spread for spread in spreads if spread]
    if not known or len(known) < len(spreads):
        return None
    return max(known, key=lambda spread: comparison.within(spread, runs=1))


def _known(key: Mapping[str, Any]) -> Spread | None:
    found = cache.look_up(_KIND, key)
    deviation, freedom = found.get("deviation"), found.get("freedom")
    if (
        isinstance(deviation, float)
        and isinstance(freedom, int)
        and 0 < deviation < math.inf
        and freedom >= _LEAST_FREEDOM
    ):
        return Spread(deviation, freedom)
    return None


def _key(run: Mapping[str, Any]) -> dict[str, Any]:
    """The machine and the size of a run that is ok."""
    environment = run.get("environment") or {}
    return {
        **{name: run.get(name) for name in ("nodes", "model", "world_size", "global_batch", "precision")},
        **{name: environment.get(name) for name in ("cpu", "cores", "devices")},
        "steps": option(run.get("config"), "train.steps", int),
    }
