"""Run-to-run noise of a configuration, stored in the user's cache by sweeps with repeats, to judge single runs by.

Long runs vary less than short ones, and large models less than small ones, so it holds only for runs of the same size
on the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ptdbench import cache
from ptdbench.comparison import variation
from ptdbench.comparison.alternatives import Alternative, name_of_sweep
from ptdbench.comparison.variation import MIN_RUNS, Difference, Noise, Pool
from ptdbench.grouping import grouped
from ptdbench.records.run_record import RunRecord

#: The folder of these measurements in the cache.
_KIND = "noise"

#: Minimum degrees of freedom of a useful estimate: two alternatives with three runs each have four.
_LEAST_FREEDOM = 4

#: Number of latest sweeps that are stored for each size of runs.
_SWEEPS = 8


def differences(pairs: Sequence[tuple[Alternative, Alternative]]) -> list[Difference | None]:
    """Return the differences of pairs of alternatives, given the noise of all alternatives of the same model.

    ``None`` for a pair in which one has fewer than :data:`ptdbench.comparison.variation.MIN_RUNS` runs.
    """
    models = grouped((pair[0].median_run.model, (id(side), side.sample)) for pair in pairs for side in pair)
    pools = {model: Pool([*dict(samples).values()]) for model, samples in models.items()}
    return [
        pools[left.median_run.model].difference(left.sample, right.sample)
        if min(len(left.sample), len(right.sample)) >= MIN_RUNS
        else None
        for left, right in pairs
    ]


@dataclass(frozen=True)
class _OfSweep(Noise):
    """The noise measured by one sweep."""

    marks: frozenset[str] = frozenset()  #: See :func:`_marks`.


def keep(alternatives: Sequence[Alternative]) -> None:
    """Cache the noise of a sweep's runs, for each size with enough runs; a full disk is ignored."""
    repeated = [alternative for alternative in alternatives if len(alternative.sample) >= MIN_RUNS]
    sizes = grouped((json.dumps(_key(item.median_run), sort_keys=True), item) for item in repeated)
    for group in sizes.values():
        key, marks = _key(group[0].median_run), _marks(run for alternative in group for run in alternative.runs)
        noise = variation.noise([alternative.sample for alternative in group])
        if noise.unpaired.freedom >= _LEAST_FREEDOM and noise.unpaired.squares:
            kept = _others(key, marks) | {min(marks): _OfSweep(noise.paired, noise.unpaired, marks)}
            written = {name: msgspec.to_builtins(of_sweep) for name, of_sweep in [*kept.items()][-_SWEEPS:]}
            with suppress(OSError):
                cache.keep(_KIND, key, {"sweeps": written})


def look_up(runs: Iterable[RunRecord]) -> Noise | None:
    """Return the noise that other sweeps measured with runs of the same size on the same machine.

    Runs without throughput do not count. For runs of several sizes, return the noise of the noisiest size; ``None`` if
    the noise of any size is unknown.
    """
    runs = [run for run in runs if run.throughput]
    keys = {json.dumps(key := _key(run), sort_keys=True): key for run in runs}
    marks = _marks(runs)  # the noise of these runs must not count twice
    of_sizes = [_others(key, marks) for key in keys.values()]
    if not all(of_sizes):
        return None
    return max(
        (sum(noises.values(), Noise()) for noises in of_sizes), key=lambda noise: noise.unpaired.deviation, default=None
    )


def _marks(runs: Iterable[RunRecord]) -> frozenset[str]:
    """Return marks that identify sweeps, even if moved: the start times of runs, else the names of the sweeps."""
    runs = [*runs]
    return frozenset(run.started for run in runs if run.started) or frozenset(map(name_of_sweep, runs))


def _others(key: Mapping[str, object], marks: frozenset[str]) -> dict[str, _OfSweep]:
    """Return the noise of each cached sweep without these marks, the latest last; skip invalid figures."""
    sweeps = cache.look_up(_KIND, key).get("sweeps")
    noises = {}
    for sweep, written in (sweeps if isinstance(sweeps, dict) else {}).items():
        with suppress(ValueError):
            noise = msgspec.convert(written, _OfSweep)
            is_other = marks.isdisjoint({sweep, *noise.marks})
            if is_other and noise.unpaired.squares and noise.unpaired.freedom >= _LEAST_FREEDOM:
                noises[sweep] = noise
    return noises


def _key(run: RunRecord) -> dict[str, object]:
    """Return the cache key of a run that is ok: its machine and its size."""
    size = ("model", "parameters", "tokens_per_sample", "world_size", "global_batch", "precision")
    return {
        "nodes": run.nodes or None,
        **{name: getattr(run, name) for name in size},
        **{name: getattr(run.environment, name) for name in ("cpu", "cores", "devices")},
        "steps": run.option("train.steps", int),
        **({"kernels": run.kernels} if run.kernels == "torch" else {}),
    }
