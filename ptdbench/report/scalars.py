"""The scalars of a run: curves over its steps, hyperparameters, and its summary.

TensorBoard and logging services get the same scalars from here.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ptdbench.problems import as_typed
from ptdbench.profiling.phases import PHASES
from ptdbench.records import ledger, series
from ptdbench.records.effects import short_names
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Evaluation
from ptdbench.records.store import Damaged
from ptdbench.report.labels import options
from ptdbench.report.steps import recorded_step, why_no_phases

#: The columns that become curves.
_SHOWN = (*series.NUMBERS, "slowest_seconds")


class Scalar(NamedTuple):
    """One point of a curve."""

    tag: str  #: The name of the curve.
    value: float  #: A finite number.
    step: int  #: The step, or the number of steps before an evaluation.
    time: float  #: When the step ended, in seconds since the epoch.


def advance(
    record: RunRecord, first: int, rows: np.ndarray, evaluations: Sequence[Evaluation], begin: float | None
) -> tuple[list[Scalar], float]:
    """Return the points of a running run's steps from ``first`` on, and when the last of them ended.

    ``rows`` are in the format of :func:`ptdbench.records.series.unknown`; ``evaluations`` are those of these steps;
    ``begin`` is when the step before ended, and ``None`` for the first of a start.
    """
    columns = {name: series.column([rows], name) for name in _SHOWN}
    return _curves(record, first, columns, evaluations, _started(record) if begin is None else begin, first, first)


def remaining(directory: Path, record: RunRecord, shown: int = 0, evaluated: int = 0) -> list[Scalar]:
    """Return the curves of the run's last start, from step ``shown`` on and evaluations after step ``evaluated``.

    docs/results.md lists the tags. TensorBoard sorts them, so throughput is first.
    """
    first, blocks = record.first_step, [*series.blocks(directory / series.NAME)]
    columns = {name: series.column(blocks, name)[first:] for name in _SHOWN}
    points, end = _curves(record, first, columns, record.evaluations, _started(record), shown, evaluated)
    return points + _phases(record, end)


def _phases(record: RunRecord, time: float) -> list[Scalar]:
    phases = {} if why_no_phases(record) else recorded_step(record).phases
    tags = {f"step_seconds/{PHASES[name].replace(' ', '_')}": mean for name, mean in phases.items() if mean}
    return [Scalar(tag, mean, max((record.steps or 0) - 1, 0), time) for tag, mean in tags.items()]


def _curves(
    record: RunRecord,
    first: int,
    columns: Mapping[str, np.ndarray],
    evaluations: Sequence[Evaluation],
    begin: float,
    shown: int,
    evaluated: int,
) -> tuple[list[Scalar], float]:
    """Return the new points of the steps from ``first`` on, which began at time ``begin``, and the end of the last."""
    seconds = columns["slowest_seconds"]
    unit, units_per_step = "samples", record.global_batch or 0
    if record.tokens_per_sample:
        unit, units_per_step = "tokens", units_per_step * record.tokens_per_sample
    curves = {
        f"speed/{unit}_per_second": units_per_step / seconds,
        "step/loss": columns["loss"],
        "step/seconds": seconds,
        "step/memory_bytes": columns["memory_bytes"],
        "step/learning_rate": columns["learning_rate"],
        "step/gradient_norm": columns["gradient_norm"],
        "step/data_wait_share": columns["wait_seconds"] / seconds,
    }
    # Use the wall times of steps: curves are written long after them.
    ends = begin + np.cumsum(np.nan_to_num(seconds))
    points = [
        Scalar(tag, float(values[place]), first + int(place), float(ends[place]))
        for tag, values in curves.items()
        for place in np.flatnonzero(np.isfinite(values))
        if first + place >= shown
    ]
    for evaluation in evaluations:
        place = evaluation.step - first - 1
        if 0 <= place < len(ends) and evaluation.step > evaluated:
            points += _evaluated(evaluation, float(ends[place]))
    return points, float(ends[-1]) if len(ends) else begin


def evaluated_at(record: RunRecord, step: int) -> list[Scalar]:
    """Return the evaluation after ``step`` steps, from an earlier start or before this start's steps, if any."""
    at_step = [evaluation for evaluation in record.evaluations if evaluation.step == step > 0]
    return [point for evaluation in at_step for point in _evaluated(evaluation, _started(record))]


def _evaluated(evaluation: Evaluation, time: float) -> list[Scalar]:
    return [
        Scalar(f"validation/{name}", value, evaluation.step, time)
        for name in ("loss", "top1", "top5", "bits_per_byte")
        if (value := getattr(evaluation, name)) is not None
    ]


def _started(record: RunRecord) -> float:
    return datetime.fromisoformat(record.started or "").timestamp()


def swept(directory: Path) -> list[str]:
    """Return the options to which the command line of a run's sweep gives several values."""
    if (sweep := ledger.sweep_of(directory.resolve())) is None:
        return []
    # Imported here, as most users of this module do not need Hydra.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    with suppress(Damaged, PermissionError, HydraException):
        typed = OverridesParser.create().parse_overrides(ledger.read(sweep).overrides)
        return [override.key_or_group for override in typed if override.is_sweep_override()]
    return []


def hparams(record: RunRecord, swept: Sequence[str]) -> dict[str, str | float]:
    """Return the hyperparameters that distinguish the runs of a sweep.

    Every run has all of them, because TensorBoard takes the columns from the first run that it reads.
    """
    config, called = options(record), short_names(swept)
    chosen: dict[str, str | float] = {
        name: getattr(record, name) or "" for name in ("model", "parallel", "precision", "kernels")
    }
    chosen |= {"ranks": record.world_size or 0, "batch": record.global_batch or 0}
    for name in swept:
        value = config.get(name)
        chosen[called[name]] = value if isinstance(value, int | float) else as_typed(value)
    return chosen


def summary(record: RunRecord) -> dict[str, float | None]:
    """Return the metrics by tag, with the same tags for every run; all values are finite.

    Only ``summary/ok`` has a value unless the run is ok: others would be sorted among those of runs that are.
    """
    metrics, last = record.metrics, record.evaluations[-1] if record.evaluations else None
    figures = {
        "throughput": metrics.tokens_per_second if record.tokens_per_sample else metrics.samples_per_second,
        "ok": float(record.status == "ok"),  # not a hyperparameter, as those are written before the end
        "model_flops_per_second": metrics.model_flops_per_second,
        "mfu": metrics.mfu,
        "mfu_causal": metrics.mfu_causal,
        "peak_memory_bytes": metrics.peak_memory_bytes,
        "peak_reserved_bytes": metrics.peak_reserved_bytes,
        "first_step_seconds": metrics.first_step_seconds,
        "step_seconds_median": record.step_seconds.median,
        "last_loss": record.final_loss,
        "top1": last.top1 if last else None,
        "bits_per_byte": last.bits_per_byte if last else None,
    }
    shown = figures if figures["ok"] else {"ok"}
    return {
        f"summary/{name}": value if value is not None and math.isfinite(value) and name in shown else None
        for name, value in figures.items()
    }
