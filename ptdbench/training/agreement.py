"""What all ranks make of their steps together, and what of it stands in the record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.job import Job, Outcome
from ptdbench.measure import memory
from ptdbench.measure.metrics import Measurement, metrics
from ptdbench.measure.statistics import warmup_end
from ptdbench.parallel import precision
from ptdbench.training.loop import StepLoop
from ptdbench.workloads.matmul import known_ceiling

#: What is kept of every step of a run, over all its starts; see :class:`Agreement`.
SERIES = ("losses", "step_memory_bytes", "wait_seconds", "learning_rates", "gradient_norms")


@dataclass(frozen=True)
class Agreement:
    """The same on every rank.

    Attributes:
        losses: The global batch's mean loss at every step; NaN where it was not finite.
        rank_step_seconds: Seconds of every step, by rank.
        step_memory_bytes: Memory in use after every step, maximum over ranks.
        wait_seconds: How long every step has waited for its batch, maximum over ranks.
        learning_rates: Of every step.
        gradient_norms: Of every step, before clipping; empty where nothing is clipped.
        peak_memory_bytes: Peak memory, by rank.
        startup_seconds: Seconds until the end of the first step, by what they were spent on, as rank 0 counts them.
    """

    losses: list[float]
    rank_step_seconds: list[list[float]]
    step_memory_bytes: list[int]
    wait_seconds: list[float]
    learning_rates: list[float]
    gradient_norms: list[float]
    peak_memory_bytes: list[int]
    startup_seconds: dict[str, float]


def reach(job: Job, loop: StepLoop) -> Agreement:
    """Bring together what every rank saw; called in all of them."""
    losses = torch.stack(loop.losses or [torch.zeros(0, device=job.device)]).flatten().double()
    losses = losses * loop.engine.owns_loss / job.training.layout.replicas  # one rank of each replica knows it
    dist.all_reduce(losses)
    mine = (
        loop.clock.seconds(),
        loop.memory_bytes,
        loop.feed.wait_seconds,
        memory.peak_bytes(job.device),
        job.watch.laps,
    )
    gathered: list[Any] = [None] * job.world.size
    dist.all_gather_object(gathered, mine)
    seconds, in_use, waits, peaks, laps = zip(*gathered, strict=True)
    norms = loop.update.gradient_norms
    return Agreement(
        losses=_finite(losses),
        rank_step_seconds=list(seconds),
        step_memory_bytes=[max(ranks) for ranks in zip(*in_use, strict=True)],
        wait_seconds=[max(ranks) for ranks in zip(*waits, strict=True)],
        learning_rates=list(loop.update.learning_rates),
        gradient_norms=_finite(torch.stack(norms)) if norms else [],
        peak_memory_bytes=list(peaks),
        startup_seconds=_until_the_last(laps),
    )


def outcome(job: Job, agreed: Agreement, history: Mapping[str, Any], remarks: Mapping[str, Any]) -> Outcome:
    """The record's fields, and whether the run has diverged.

    Args:
        job: The run.
        agreed: The steps of this process.
        history: What :func:`joined` makes of the steps before them.
        remarks: What the reader of the record should know.
    """
    before = history["segments"]
    timed = [seconds for one in before if one["layout"] == _layout(job) for seconds in one["timed_seconds"]]
    warmup_steps, figures = metrics(_measurement(job, agreed, timed))
    whole = joined(history, job, agreed)
    fields = {
        "warmup_steps": warmup_steps,
        "metrics": figures,
        "remarks": dict(remarks),
        "rank_step_seconds": agreed.rank_step_seconds,
        **whole,
    }
    wrong = next((step for step, loss in enumerate(whole["losses"]) if not math.isfinite(loss)), None)
    if wrong is None:
        return Outcome(fields)
    return Outcome(fields, error=FloatingPointError(f"the loss of step {wrong} is not a finite number"))


def joined(history: Mapping[str, Any], job: Job, agreed: Agreement) -> dict[str, Any]:
    """The whole run so far: what earlier processes have done, and this one.

    Returns:
        What :data:`SERIES` names, for every step, and ``segments``, one for each start of the run.
    """
    steps_before = len(history["losses"])
    return {
        **{name: _one_after_the_other(history[name], getattr(agreed, name), steps_before) for name in SERIES},
        "segments": [*history["segments"], segment(job, agreed, len(history["losses"]))],
    }


def segment(job: Job, agreed: Agreement, first_step: int) -> dict[str, Any]:
    """What one start of a run has done: its times are not mixed with those of other starts.

    Returns:
        ``first_step`` and ``steps``, the layout, ``warmup_steps``, ``timed_seconds`` (of the slowest rank, warm-up left
        out), ``rank_step_seconds`` and ``startup_seconds``.
    """
    slowest = [max(seconds) for seconds in zip(*agreed.rank_step_seconds, strict=True)]
    warmup_steps = warmup_end(slowest, job.spec.config.train.warmup_steps)
    return {
        "first_step": first_step,
        "steps": len(agreed.losses),
        "layout": _layout(job),
        "warmup_steps": warmup_steps,
        "timed_seconds": slowest[warmup_steps:],
        "rank_step_seconds": agreed.rank_step_seconds,
        "startup_seconds": agreed.startup_seconds,
    }


def _layout(job: Job) -> dict[str, Any]:
    """What steps must have in common for their times to be comparable."""
    return {
        "parallel": job.spec.config.resolved["parallel"],
        "launcher": job.world.launcher,
        "nodes": sorted({peer.node for peer in job.peers}),
        **job.training.layout.as_dict(),
    }


def _measurement(job: Job, agreed: Agreement, timed: Sequence[float]) -> Measurement:
    spec, training = job.spec, job.training
    dtype = precision.arithmetic(spec.config.general.precision, job.device.type)
    return Measurement(
        rank_step_seconds=agreed.rank_step_seconds,
        samples_per_step=training.layout.global_batch,
        tokens_per_sample=training.data.tokens_per_sample,
        flops_per_sample=training.flops_per_sample,
        flops_reason=training.flops_reason,
        world_size=spec.world_size,
        device_name=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        dtype=dtype,
        peak_memory_bytes=agreed.peak_memory_bytes,
        first_step_seconds=sum(agreed.startup_seconds.values()),
        startup_seconds=agreed.startup_seconds,
        minimum_warmup=spec.config.train.warmup_steps,
        earlier_seconds=timed,
        wait_seconds=agreed.wait_seconds,
        ceiling=known_ceiling(job, dtype),
    )


def _one_after_the_other(before: list[Any], now: list[Any], steps_before: int) -> list[Any]:
    """Two stretches of a series; what was not kept in the first one has no number in it."""
    missing = [math.nan] * (steps_before - len(before)) if now else []
    return [*before, *missing, *now]


def _finite(values: torch.Tensor) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values.tolist()]


def _until_the_last(laps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Rank 0's laps, the first step drawn out until the last rank had finished its own."""
    ends = [sum(of_rank.values()) for of_rank in laps]
    waited = max(ends) - ends[0]
    return laps[0] | {"first_step": laps[0].get("first_step", 0.0) + waited}  # none where there was nothing left to do
