"""From the measurements of the ranks to the figures of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptdbench.measure.ceiling import Measured
from ptdbench.measure.hardware import dense_peak
from ptdbench.measure.statistics import summary, warmup_end


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The combined measurements of all ranks of a run.

    Attributes:
        step_seconds: Seconds of every step on its slowest rank; the first step included.
        samples_per_step: Samples of one step over all ranks: the global batch.
        tokens_per_sample: Sequence length; ``None`` where samples are not token sequences.
        flops_per_sample: FLOPs of forward and backward for one sample by the model's formula, if it has one.
        flops_reason: Why there is no such formula, else ``None``.
        world_size: Ranks, one device each.
        device_name: As ``torch.cuda.get_device_name`` reports it, or ``cpu``.
        dtype: Arithmetic of matrix products: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        peak_memory_bytes: Peak memory, maximum over ranks.
        peak_reserved_bytes: Peak of what torch's allocator took from the device, likewise; ``None`` on a CPU.
        first_step_seconds: From the start of the run's first step to its end, compilation included.
        startup_seconds: Seconds of each phase before the first step, by name.
        minimum_warmup: Minimum number of warm-up steps.
        earlier_seconds: Seconds of steps of earlier starts of this run, without their warm-up.
        wait_seconds: Seconds that each step of ``step_seconds`` waited for its batch, maximum over ranks.
        ceiling: What was measured on this device in matrix products of ``dtype``, or ``None`` and the reason.
        masked_flops_per_sample: Of ``flops_per_sample``, those for what causal attention masks; ``None`` if unknown.
    """

    step_seconds: Sequence[float]
    samples_per_step: int
    tokens_per_sample: int | None
    flops_per_sample: float | None
    flops_reason: str | None
    world_size: int
    device_name: str
    dtype: str
    peak_memory_bytes: int | None
    peak_reserved_bytes: int | None = None
    first_step_seconds: float | None
    startup_seconds: Mapping[str, float]
    minimum_warmup: int
    earlier_seconds: Sequence[float] = ()
    wait_seconds: Sequence[float] = ()
    ceiling: tuple[Measured | None, str | None] = (None, "no ceiling was looked up")
    masked_flops_per_sample: float | None = None


def metrics(measured: Measurement) -> tuple[int, dict[str, Any]]:
    """The number of warm-up steps, and the figures of the steps after them.

    A step takes as long as its slowest rank. Throughput is all timed samples over all timed seconds, not a mean of
    rates, which would favor runs with uneven steps. ``mfu`` is model FLOP/s per device over the device's dense peak
    (Chowdhery et al., "PaLM", 2022, appendix B): recomputed FLOPs do not count. ``mfu_causal`` is the same without the
    FLOPs for what causal attention masks.

    Returns:
        ``(warmup_steps, figures)``. The figures have the same names for every run; unknown ones are ``None``, such
        as all rates of a run that finished no step.
    """
    warmup_steps = warmup_end(measured.step_seconds, measured.minimum_warmup)
    own = measured.step_seconds[warmup_steps:]
    timed = [*measured.earlier_seconds, *own]

    samples_per_second = measured.samples_per_step * len(timed) / sum(timed) if timed else None
    tokens_per_second = _times(samples_per_second, measured.tokens_per_sample)
    flops_per_second = _times(samples_per_second, measured.flops_per_sample)
    per_device = 1 / measured.world_size
    rate = _times(flops_per_second, per_device)
    mfu, mfu_reason = _mfu(measured, rate, measured.dtype)
    causal = _times(flops_per_second, _unmasked(measured))
    return warmup_steps, {
        "step_seconds": summary(timed),
        "tokens_per_second": tokens_per_second,
        "samples_per_second": samples_per_second,
        "tokens_per_second_per_device": _times(tokens_per_second, per_device),
        "samples_per_second_per_device": _times(samples_per_second, per_device),
        "model_flops_per_second": flops_per_second,
        "mfu": mfu,
        "mfu_reason": mfu_reason,
        "mfu_of_bf16": _mfu(measured, rate, "bf16")[0] if measured.dtype == "fp8" else None,
        **against_ceiling(*measured.ceiling, _times(flops_per_second, per_device)),
        "data_wait_share": _share(measured.wait_seconds[warmup_steps:], own),
        "peak_memory_bytes": measured.peak_memory_bytes,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "first_step_seconds": measured.first_step_seconds,
        "startup_seconds": dict(measured.startup_seconds),
        "causal_flops_per_second": causal,
        "mfu_causal": _mfu(measured, _times(causal, per_device), measured.dtype)[0],
    }


def _unmasked(measured: Measurement) -> float | None:
    """The share of the model's FLOPs that causal attention does not mask."""
    full, masked = measured.flops_per_sample, measured.masked_flops_per_sample
    return None if not full or masked is None else 1 - masked / full


#: Those of a run on virtual GPUs.
_OF_VIRTUAL = ("peak_memory_bytes", "peak_reserved_bytes", "first_step_seconds", "startup_seconds")


def without_times(measured: Measurement) -> dict[str, Any]:
    """The figures of a run whose device computes nothing: its memory, and how long the host took to begin."""
    _, found = metrics(measured)
    return {name: value if name in _OF_VIRTUAL else None for name, value in found.items()}


def _times(quantity: float | None, factor: float | None) -> float | None:
    return None if quantity is None or factor is None else quantity * factor


def _share(part: Sequence[float], whole: Sequence[float]) -> float | None:
    return sum(part) / sum(whole) if part and whole else None


def _mfu(
    measured: Measurement, flops_per_second_per_device: float | None, dtype: str
) -> tuple[float | None, str | None]:
    """Model FLOPs utilization by the peak of a dtype, or why there is none."""
    if measured.flops_per_sample is None:
        return None, measured.flops_reason or "the model states no FLOPs"
    if flops_per_second_per_device is None:
        return None, "no step was finished"
    peak, reason = dense_peak(measured.device_name, dtype)
    return (None, reason) if peak is None else (flops_per_second_per_device / peak, None)


def against_ceiling(
    ceiling: Measured | None, reason: str | None, flops_per_second_per_device: float | None
) -> dict[str, Any]:
    """The ceiling measured on this device, or why there is none, and the model FLOP/s as a share of it."""
    rate = ceiling.flops_per_second if ceiling else None
    return {
        "ceiling_flops_per_second": rate,
        "ceiling_beside_load": ceiling.beside_load if ceiling else None,
        "share_of_ceiling": None if rate is None else _times(flops_per_second_per_device, 1 / rate),
        "ceiling_reason": reason,
    }
