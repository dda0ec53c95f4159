"""The measured fields of a training run's record, computed on rank 0 from the series gathered from all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptdbench.job import Job
from ptdbench.measure.ceiling import Measured
from ptdbench.measure.metrics import Measurement, metrics
from ptdbench.measure.statistics import warmup_end
from ptdbench.parallel import precision
from ptdbench.records import series
from ptdbench.workloads.matmul import known_ceiling

Ceiling = tuple[Measured | None, str | None]


def ceiling(job: Job) -> Ceiling:
    """What matrix products of the run's arithmetic reach on this device; see :func:`known_ceiling`."""
    dtype = dtype_of(job)
    return (None, "workload=matmul measures no products in fp8") if dtype == "fp8" else known_ceiling(job, dtype)


def figures(
    job: Job, path: Path, segments: Sequence[dict[str, Any]], peak_bytes: int, ceiling: Ceiling
) -> dict[str, Any]:
    """The fields that the steps so far account for.

    Args:
        job: The run.
        path: The series file of the run.
        segments: Its starts, in the form of a record; each gains its ``warmup_steps``.
        peak_bytes: Peak memory, the maximum over ranks.
        ceiling: The result of :func:`ceiling`.
    """
    by_rank = any(_local_steps(one) > 1 for one in segments)
    losses, seconds, waits = (
        series.column(series.blocks(path), name)
        for name in ("loss", "step_seconds" if by_rank else "slowest_seconds", "wait_seconds")
    )
    starts = [_start(one, seconds, waits) for one in segments]
    for one, start in zip(segments, starts, strict=True):
        minimum = math.ceil(job.spec.config.train.warmup_steps / start.every)
        known = start.seconds[np.isfinite(start.seconds)]
        one.setdefault("warmup_steps", start.steps(warmup_end(known, minimum)))
    last, own = segments[-1], starts[-1]
    timed = [
        start.seconds[start.periods(one["warmup_steps"]) :]
        for one, start in zip(segments[:-1], starts[:-1], strict=True)
        if one["layout"] == last["layout"]
    ]
    before = np.concatenate([np.empty(0), *timed])
    warmup, found = metrics(_measurement(job, last, own, before[np.isfinite(before)], peak_bytes, ceiling))
    return {
        "warmup_steps": own.steps(warmup),
        "metrics": found,
        "steps": len(losses),
        "final_loss": losses[-1] if len(losses) else None,
        "segments": list(segments),
    }


def first_not_finite(path: Path) -> int | None:
    """The first step whose loss is not a finite number; a step that was lost has no time either, and does not count."""
    losses, seconds = (series.column(series.blocks(path), name) for name in ("loss", "slowest_seconds"))
    wrong = np.flatnonzero(np.isnan(losses) & np.isfinite(seconds))
    return int(wrong[0]) if len(wrong) else None


@dataclass(frozen=True)
class _Start:
    """The times of one start of a run, in periods: those between two averages of local SGD, else single steps.

    Copies that train on their own wait for each other only at the end of a period, so it is a period that takes as
    long as its slowest rank.

    Attributes:
        every: Steps of a period.
        first: Number of steps before the first whole period.
        taken: Number of steps.
        seconds: Of each whole period, divided by its steps: ``[periods]``.
        waits: In these what was spent waiting for batches.
    """

    every: int
    first: int
    taken: int
    seconds: np.ndarray
    waits: np.ndarray

    def steps(self, periods: int) -> int:
        """The number of steps until the end of so many periods."""
        return min(self.first + periods * self.every, self.taken)

    def periods(self, steps: int) -> int:
        """The number of whole periods that begin within so many steps."""
        return max(math.ceil((steps - self.first) / self.every), 0)


def _start(segment: Mapping[str, Any], seconds: np.ndarray, waits: np.ndarray) -> _Start:
    """One start, from the series of the run: ``[steps]`` of the slowest rank, or ``[steps, ranks]``."""
    every, own, own_waits = _local_steps(segment), _of(segment, seconds), _of(segment, waits)
    first = min(-segment["first_step"] % every, len(own))
    whole = slice(first, first + (len(own) - first) // every * every)
    of_ranks = own[whole].reshape(-1, every, own.shape[1] if own.ndim > 1 else 1).sum(axis=1) / every
    return _Start(
        every,
        first,
        len(own),
        np.fmax.reduce(of_ranks, axis=1),
        own_waits[whole].reshape(-1, every).sum(axis=1) / every,
    )


def _local_steps(segment: Mapping[str, Any]) -> int:
    """Steps from one average of weights to the next; 1 in records from before there was local SGD."""
    return int(segment["layout"]["parallel"].get("local_steps", 1))


def _of(segment: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """The part of a series that belongs to one start of the run."""
    return values[segment["first_step"] :][: segment["steps"]]


def _measurement(
    job: Job,
    last: Mapping[str, Any],
    own: _Start,
    earlier: np.ndarray,
    peak: int,
    ceiling: Ceiling,
) -> Measurement:
    """Collect the input of the metrics.

    Args:
        job: The run.
        last: The segment of this process.
        own: Its times.
        earlier: Seconds of what was timed in earlier segments of the same layout.
        peak: Peak memory in bytes.
        ceiling: The result of :func:`ceiling`.
    """
    spec, training = job.spec, job.training
    return Measurement(
        step_seconds=own.seconds.tolist(),
        samples_per_step=training.layout.global_batch,
        tokens_per_sample=training.data.tokens_per_sample,
        flops_per_sample=training.flops_per_sample,
        flops_reason=training.flops_reason,
        world_size=spec.world_size,
        device_name=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        dtype=dtype_of(job),
        peak_memory_bytes=peak,
        first_step_seconds=sum(last["startup_seconds"].values()),
        startup_seconds=last["startup_seconds"],
        minimum_warmup=math.ceil(spec.config.train.warmup_steps / own.every),
        earlier_seconds=earlier.tolist(),
        wait_seconds=own.waits.tolist(),
        ceiling=ceiling,
    )


def dtype_of(job: Job) -> str:
    """The arithmetic of the run's matrix products."""
    return precision.arithmetic(job.spec.config.general.precision, job.device.type)
