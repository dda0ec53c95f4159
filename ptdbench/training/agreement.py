"""The result of a training run: the fields of its record, computed from the series gathered from all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ptdbench.job import Job, Outcome
from ptdbench.measure import memory
from ptdbench.measure.metrics import Measurement, metrics
from ptdbench.measure.statistics import warmup_end
from ptdbench.parallel import precision
from ptdbench.records import series
from ptdbench.training.recorder import Recorder
from ptdbench.workloads.matmul import known_ceiling


def outcome(job: Job, recorder: Recorder, remarks: Mapping[str, Any]) -> Outcome:
    """Compute the record's fields and whether the run diverged; called in all ranks after the last step.

    Args:
        job: The run.
        recorder: Holds the steps of the run.
        remarks: Remarks for the record.

    Returns:
        All fields on rank 0; only the remarks on other ranks.
    """
    shown = recorder.finish()
    peak = torch.tensor(memory.peak_bytes(job.device), device=job.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    segments = recorder.segments()
    if job.world.rank > 0:
        return Outcome({"remarks": dict(remarks)})
    losses, seconds, waits = (
        series.column(series.blocks(recorder.path), name) for name in ("loss", "slowest_seconds", "wait_seconds")
    )
    for one in segments:
        own = _of(one, seconds)
        one.setdefault("warmup_steps", warmup_end(own[np.isfinite(own)], job.spec.config.train.warmup_steps))
    *earlier, last = segments
    timed = [_of(one, seconds)[one["warmup_steps"] :] for one in earlier if one["layout"] == last["layout"]]
    before = np.concatenate([np.empty(0), *timed])
    measured = _measurement(job, last, _of(last, seconds), before[np.isfinite(before)], _of(last, waits), int(peak))
    warmup_steps, figures = metrics(measured)
    fields = {
        "warmup_steps": warmup_steps,
        "metrics": figures,
        "remarks": dict(remarks),
        "steps": len(losses),
        "final_loss": losses[-1] if len(losses) else None,
        "segments": segments,
    }
    wrong = np.flatnonzero(np.isnan(losses) & np.isfinite(seconds))  # a lost step has no time either
    error = FloatingPointError(f"the loss of step {wrong[0]} is not a finite number") if len(wrong) else None
    return Outcome(fields, error=error, shown=shown)


def _of(segment: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """The part of a series that belongs to one start of the run."""
    return values[segment["first_step"] :][: segment["steps"]]


def _measurement(
    job: Job, last: Mapping[str, Any], seconds: np.ndarray, earlier: np.ndarray, waits: np.ndarray, peak: int
) -> Measurement:
    """Collect the input of the metrics.

    Args:
        job: The run.
        last: The segment of this process.
        seconds: Seconds of each of its steps on the slowest rank.
        earlier: Seconds of the timed steps of earlier segments of the same layout.
        waits: Seconds that each of its steps waited for its batch.
        peak: Peak memory in bytes.
    """
    spec, training = job.spec, job.training
    dtype = precision.arithmetic(spec.config.general.precision, job.device.type)
    return Measurement(
        step_seconds=seconds.tolist(),
        samples_per_step=training.layout.global_batch,
        tokens_per_sample=training.data.tokens_per_sample,
        flops_per_sample=training.flops_per_sample,
        flops_reason=training.flops_reason,
        world_size=spec.world_size,
        device_name=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        dtype=dtype,
        peak_memory_bytes=peak,
        first_step_seconds=sum(last["startup_seconds"].values()),
        startup_seconds=last["startup_seconds"],
        minimum_warmup=spec.config.train.warmup_steps,
        earlier_seconds=earlier.tolist(),
        wait_seconds=waits.tolist(),
        ceiling=known_ceiling(job, dtype),
    )
