"""Noise between runs of the same configuration, kept in the user's cache by sweeps with repeats.

It is what a table of single runs is judged by, and a prior for those of few repeats. Long runs differ less than short
ones, and a large model less than a small one, so that it holds for runs of the same size on the same machine alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from ptdbench import cache
from ptdbench.comparison import variation
from ptdbench.comparison.alternatives import Alternative, name_of_sweep, throughput
from ptdbench.comparison.variation import MIN_RUNS, Difference, Noise, Pool
from ptdbench.records.record import option
from ptdbench.records.schema import Environment, Written, part

#: The folder of such measurements in the cache.
_KIND = "noise"

#: Fewer degrees of freedom say too little: two alternatives with three runs each have four.
_LEAST_FREEDOM = 4

#: Of each size the latest sweeps are known, by the names of their directories.
_SWEEPS = 8


def differences(pairs: Sequence[tuple[Alternative, Alternative]]) -> list[Difference | None]:
    """Return the distances of alternatives, those of each model judged together, with the noise of earlier sweeps.

    ``None`` for a pair of which one has less than :data:`ptdbench.comparison.variation.MIN_RUNS` runs.
    """
    models: dict[Any, dict[int, Alternative]] = {}
    for pair in pairs:
        models.setdefault(pair[0].median_run.get("model"), {}).update((id(one), one) for one in pair)
    pools = {model: pool([*found.values()]) for model, found in models.items()}
    return [
        pools[one.median_run.get("model")].difference(one.sample, other.sample)
        if min(len(one.sample), len(other.sample)) >= MIN_RUNS
        else None
        for one, other in pairs
    ]


def pool(found: Sequence[Alternative]) -> Pool:
    """The alternatives of a model, with what is known from earlier sweeps."""
    return Pool([one.sample for one in found], look_up(run for one in found for run in one.runs))


@dataclass(frozen=True)
class _OfSweep(Noise):
    """The noise that one sweep found."""

    marks: frozenset[str] = frozenset()  #: See :func:`_marks`.


def keep(found: Sequence[Alternative]) -> None:
    """Store how much the runs of a sweep differ, for each size of runs of which there are enough.

    A full disk is no failure.
    """
    groups: dict[str, list[Alternative]] = {}
    for one in found:
        if len(one.sample) >= MIN_RUNS:
            groups.setdefault(json.dumps(_key(one.median_run), sort_keys=True), []).append(one)
    for group in groups.values():
        key, sweep = _key(group[0].median_run), name_of_sweep(group[0].median_run)
        noise, marks = variation.noise([one.sample for one in group]), _marks(run for one in group for run in one.runs)
        if noise.unpaired.freedom >= _LEAST_FREEDOM and noise.unpaired.squares:
            kept = _others(key, marks) | {sweep: _OfSweep(noise.paired, noise.unpaired, marks)}
            written = {name: msgspec.to_builtins(one) for name, one in [*kept.items()][-_SWEEPS:]}
            with suppress(OSError):
                cache.keep(_KIND, key, {"sweeps": written})


def look_up(runs: Iterable[Written]) -> Noise | None:
    """Return what other sweeps measured with runs as large as these on their machine.

    Runs without throughput do not count. Of runs of several sizes that of the size whose runs differ most; ``None`` if
    one of them is not known.
    """
    runs = [run for run in runs if throughput(run)]
    keys = {json.dumps(key := _key(run), sort_keys=True): key for run in runs}
    own = _marks(runs)  # what they say themselves is known
    found = [_others(key, own) for key in keys.values()]
    if not all(found):
        return None
    return max(
        (sum(noises.values(), Noise()) for noises in found), key=lambda noise: noise.unpaired.deviation, default=None
    )


def _marks(runs: Iterable[Written]) -> frozenset[str]:
    """What sweeps are known by: their names, and when runs began, as they may have been moved since."""
    return frozenset(mark for run in runs for mark in (name_of_sweep(run), run.get("started")) if mark)


def _others(key: Mapping[str, Any], marks: frozenset[str]) -> dict[str, _OfSweep]:
    """Return what each sweep without these marks found, the latest one last; without those whose figures cannot be."""
    found = cache.look_up(_KIND, key).get("sweeps")
    noises = {}
    for sweep, written in (found if isinstance(found, dict) else {}).items():
        with suppress(ValueError):
            noise = msgspec.convert(written, _OfSweep)
            is_other = marks.isdisjoint({sweep, *noise.marks})
            if is_other and noise.unpaired.squares and noise.unpaired.freedom >= _LEAST_FREEDOM:
                noises[sweep] = noise
    return noises


def _key(run: Written) -> dict[str, Any]:
    """The machine and the size of a run that is ok."""
    environment = part(run, Environment)
    return {
        **{name: run.get(name) for name in ("nodes", "model", "world_size", "global_batch", "precision")},
        **{name: getattr(environment, name) for name in ("cpu", "cores", "devices")},
        "steps": option(run, "train.steps", int),
    }
