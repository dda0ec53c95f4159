"""The measured fields of a training run's record, computed on rank 0 from the series gathered from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptdbench.job import Job
from ptdbench.measure.ceiling import Measured
from ptdbench.measure.gemm import known_ceiling
from ptdbench.measure.metrics import Measurement, metrics, without_times
from ptdbench.measure.statistics import warmup_end
from ptdbench.parallel import precision
from ptdbench.records import series

Ceiling = tuple[Measured | None, str | None]


def ceiling(job: Job) -> Ceiling:
    """What matrix products of the run's arithmetic reach on this device; see :func:`known_ceiling`."""
    dtype = dtype_of(job)
    if job.spec.virtual:
        return None, "virtual GPUs have none"
    if dtype == "fp8":
        return None, "workload=matmul measures no products in fp8"
    return known_ceiling(job.world, job.device, dtype, job.spec.config.cluster.cpus_per_rank)


def figures(
    job: Job, path: Path, segments: Sequence[dict[str, Any]], peaks: tuple[int, int], ceiling: Ceiling
) -> dict[str, Any]:
    """The fields that the steps so far account for.

    Args:
        job: The run.
        path: The series file of the run.
        segments: Its starts, in the form of a record; each gains its ``warmup_steps``.
        peaks: Peak memory in bytes, allocated and reserved, the maxima over ranks.
        ceiling: The result of :func:`ceiling`.
    """
    losses, seconds, waits = (
        series.column(series.blocks(path), name) for name in ("loss", "slowest_seconds", "wait_seconds")
    )
    of_starts = [_of(one, seconds) for one in segments]
    for one, own in zip(segments, of_starts, strict=True):
        one.setdefault("warmup_steps", warmup_end(own[np.isfinite(own)], job.spec.config.train.warmup_steps))
    last, own = segments[-1], of_starts[-1]
    timed = [
        earlier[one["warmup_steps"] :]
        for one, earlier in zip(segments[:-1], of_starts[:-1], strict=True)
        if one["layout"] == last["layout"]
    ]
    before = np.concatenate([np.empty(0), *timed])
    measured = _measurement(job, last, own, _of(last, waits), before[np.isfinite(before)], peaks, ceiling)
    if job.spec.virtual:
        warmup, found = 0, without_times(replace(measured, step_seconds=(), wait_seconds=()))
    else:
        warmup, found = metrics(measured)
    return {
        "warmup_steps": warmup,
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


def _of(segment: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """The part of a series that belongs to one start of the run."""
    return values[segment["first_step"] :][: segment["steps"]]


def _measurement(
    job: Job,
    last: Mapping[str, Any],
    own: np.ndarray,
    waits: np.ndarray,
    earlier: np.ndarray,
    peaks: tuple[int, int],
    ceiling: Ceiling,
) -> Measurement:
    """Collect the input of the metrics.

    Args:
        job: The run.
        last: The segment of this process.
        own: Seconds of its steps.
        waits: Of these, seconds that each waited for its batch.
        earlier: Seconds of what was timed in earlier segments of the same layout.
        peaks: Peak memory in bytes, allocated and reserved.
        ceiling: The result of :func:`ceiling`.
    """
    spec, training = job.spec, job.training
    return Measurement(
        step_seconds=own.tolist(),
        samples_per_step=training.layout.global_batch,
        tokens_per_sample=training.data.tokens_per_sample,
        flops_per_sample=training.flops_per_sample,
        masked_flops_per_sample=training.masked_flops_per_sample,
        flops_reason=training.flops_reason,
        world_size=spec.world_size,
        device_name=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        dtype=dtype_of(job),
        peak_memory_bytes=peaks[0],
        peak_reserved_bytes=peaks[1] or None,
        first_step_seconds=sum(last["startup_seconds"].values()),
        startup_seconds=last["startup_seconds"],
        minimum_warmup=spec.config.train.warmup_steps,
        earlier_seconds=earlier.tolist(),
        wait_seconds=waits.tolist(),
        ceiling=ceiling,
    )


def dtype_of(job: Job) -> str:
    """The arithmetic of the run's matrix products."""
    return precision.arithmetic(job.spec.config.general.precision, job.device.type)
