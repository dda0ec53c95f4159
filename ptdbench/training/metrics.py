"""The measured fields of a training run's record."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from msgspec import to_builtins

from ptdbench.grouping import grouped
from ptdbench.job import Job, Results
from ptdbench.launch.collect import gather
from ptdbench.measure.hardware import environment
from ptdbench.measure.products import ceiling_key, stored_ceiling
from ptdbench.measure.results import Ceiling
from ptdbench.measure.timing import summary, warmup_ends
from ptdbench.parallel import precision
from ptdbench.peaks import dense_peak
from ptdbench.records import series
from ptdbench.records.schema import Experts, Metrics, Segment
from ptdbench.setup.training_spec import Flops
from ptdbench.training.loop import StepLoop


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The timed steps of a run, as measured on all ranks."""

    seconds: Sequence[float]  #: Seconds of each timed step on its slowest rank, of all starts.
    samples_per_step: int  #: Samples of one step over all ranks: the global batch.
    tokens_per_sample: int | None  #: Sequence length; ``None`` if samples are not token sequences.
    flops: Flops  #: FLOPs of the model.
    world_size: int  #: Ranks, one device each.
    device_name: str  #: As returned by :func:`device_name`.
    dtype: str  #: Arithmetic of matrix products: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
    data_wait_share: float | None = None  #: Share of the last start's timed steps spent waiting for batches.
    ceiling: Ceiling | None = None  #: The ceiling in ``dtype``, if it is known.


def metrics(measured: Measurement) -> Metrics:
    """Compute the figures of the steps after the warm-up; unknown ones are ``None``.

    Throughput is the total of timed samples over the total of timed seconds, not a mean of rates, which would favor
    runs with uneven steps. docs/measurements.md defines the others.
    """
    timed = measured.seconds
    samples_per_second = measured.samples_per_step * len(timed) / sum(timed) if timed else None
    tokens_per_second = _times(samples_per_second, measured.tokens_per_sample)
    flops_per_second = _times(samples_per_second, measured.flops.per_sample)
    rate = _times(flops_per_second, 1 / measured.world_size)
    mfu, mfu_reason = _mfu(measured, rate)
    full, masked = measured.flops.per_sample, measured.flops.masked
    causal = _times(rate, 1 - masked / full if full and masked is not None else None)
    figures = Metrics(
        step_seconds=summary(timed),
        tokens_per_second=tokens_per_second,
        samples_per_second=samples_per_second,
        model_flops_per_second=flops_per_second,
        mfu=mfu,
        mfu_reason=mfu_reason,
        data_wait_share=measured.data_wait_share,
        mfu_causal=_mfu(measured, causal)[0],
    )
    if ceiling := measured.ceiling:
        figures.ceiling_flops_per_second = ceiling.flops_per_second
        figures.share_of_ceiling = _times(rate, 1 / ceiling.flops_per_second)
    return figures


def _times(quantity: float | None, factor: float | None) -> float | None:
    return None if quantity is None or factor is None else quantity * factor


def _mfu(measured: Measurement, rate: float | None) -> tuple[float | None, str | None]:
    """Return the utilization of the peak at a rate of model FLOP/s per device, or why there is none."""
    if measured.flops.per_sample is None:
        return None, measured.flops.reason or "the model's FLOPs are unknown"
    if rate is None:
        return None, "no step finished"
    peak, reason = dense_peak(measured.device_name, measured.dtype)
    return (None, reason) if peak is None else (rate / peak, None)


def ceiling_of_run(job: Job) -> Ceiling | None:
    """Return what ``workload=matmul`` has measured in the run's arithmetic on exactly this device, if it has."""
    if job.device.type == "cuda" and device_name(job) != torch.cuda.get_device_name(job.device):
        return None  # the ranks have different GPUs
    return stored_ceiling(ceiling_key(environment(job.device.type), job.device, dtype_of(job)))


def figures(job: Job, path: Path, segments: Sequence[Segment], ceiling: Ceiling | None) -> Results:
    """Compute the results, without memory, of the steps so far, read from the series file at ``path``.

    ``segments``: the run's starts, whose ``warmup_steps`` are set.
    """
    losses, seconds, waits = (
        series.column(series.blocks(path), name) for name in ("loss", "slowest_seconds", "wait_seconds")
    )
    of_last, earlier = _timed_seconds(segments, seconds, job.spec.config.train.warmup_steps)
    last, training = segments[-1], job.training
    waited = _of(last, waits)[last.warmup_steps :]
    if job.spec.virtual:  # virtual devices compute nothing
        figures = Metrics()
    else:
        figures = metrics(
            Measurement(
                seconds=[*earlier, *of_last],
                samples_per_step=training.layout.global_batch,
                tokens_per_sample=training.data.tokens_per_sample,
                flops=training.flops,
                world_size=job.spec.world_size,
                device_name=device_name(job),
                dtype=dtype_of(job),
                data_wait_share=float(waited.sum()) / sum(of_last) if len(waited) and of_last else None,
                ceiling=ceiling,
            )
        )
    figures.startup_seconds = last.startup_seconds
    figures.first_step_seconds = sum(last.startup_seconds.values())
    return Results(
        warmup_steps=last.warmup_steps,
        metrics=figures,
        steps=len(losses),
        final_loss=losses[-1] if len(losses) else None,
        segments=segments,
    )


def _timed_seconds(segments: Sequence[Segment], seconds: np.ndarray, minimum: int) -> tuple[list[float], list[float]]:
    """Set the ``warmup_steps`` of each start, at least ``minimum``; return the seconds of the last start's other steps.

    And of those of earlier starts with the same layout, where known.
    """
    of_starts = [of_start[np.isfinite(of_start)].tolist() for of_start in (_of(start, seconds) for start in segments)]
    layouts = (json.dumps(to_builtins(start.layout), sort_keys=True) for start in segments)
    groups = grouped((layout, place) for place, layout in enumerate(layouts))
    for alike in groups.values():
        ends = warmup_ends([of_starts[place] for place in alike], minimum)
        for place, end in zip(alike, ends, strict=True):
            segments[place].warmup_steps = end
    *earlier, last = (
        of_starts[place][segments[place].warmup_steps :]
        for place in next(alike for alike in groups.values() if len(segments) - 1 in alike)
    )
    return last, [second for of_start in earlier for second in of_start]


def first_nonfinite_loss(path: Path) -> int | None:
    """Return the first step whose loss is not finite; lost steps, which have no time, do not count."""
    losses, seconds = (series.column(series.blocks(path), name) for name in ("loss", "slowest_seconds"))
    wrong = np.flatnonzero(np.isnan(losses) & np.isfinite(seconds))
    return int(wrong[0]) if len(wrong) else None


def _of(segment: Segment, values: np.ndarray) -> np.ndarray:
    """Return the part of a series that belongs to one start of the run."""
    return values[segment.first_step :][: segment.steps]


def device_name(job: Job) -> str:
    """Return ``cpu``, or the ranks' GPU name as reported by torch, or all names if they differ."""
    if job.device.type == "cpu":
        return "cpu"
    return " and ".join(sorted({peer.device.partition(" ")[2] for peer in job.peers}))


def dtype_of(job: Job) -> str:
    """Return the arithmetic of the run's matrix products."""
    return precision.arithmetic(job.spec.config.general.precision, job.device.type)


def experts(job: Job, loop: StepLoop) -> Experts | None:
    """Return the distribution of tokens over experts, ``None`` without experts or steps; called in all ranks."""
    if job.spec.virtual:  # experts take turns, which says nothing of a router
        return None
    of_ranks: list[tuple[dict[str, list[float]], list[float]]] = gather(loop.engine.routed())
    counts = {name: numbers for of_rank, _ in of_ranks for name, numbers in of_rank.items()}
    if not any(map(any, counts.values())):
        return None
    fullest = [ratio for _, of_rank in of_ranks for ratio in of_rank]
    return Experts(
        tokens={name: [round(number) for number in numbers[:-1]] for name, numbers in sorted(counts.items())},
        dropped=round(sum(numbers[-1] for numbers in counts.values())),
        fullest_rank=fmean(fullest) if fullest else None,
    )
