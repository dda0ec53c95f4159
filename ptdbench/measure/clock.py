"""Clocks for steps: they time what is between ``start`` and ``stop``, and nothing else."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Times steps."""

    def start(self) -> None:
        """A step begins."""

    def stop(self) -> None:
        """The step is over (on a GPU: all its work has been queued)."""

    def over(self, step: int) -> bool:
        """Whether the device has finished the step; never blocks."""

    def seconds(self) -> list[float]:
        """Seconds of every step that is not forgotten; waits for the device."""

    def forget(self) -> None:
        """Forget the steps so far: the next one is step 0."""


class HostClock:
    """Wall-clock time of the host, for devices that work synchronously."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """The step is over."""
        self._seconds.append(time.perf_counter() - self._started)

    def over(self, step: int) -> bool:
        """Whether the step is timed, and so finished on a synchronous device."""
        return step < len(self._seconds)

    def seconds(self) -> list[float]:
        """Seconds of every step that is not forgotten."""
        return list(self._seconds)

    def forget(self) -> None:
        """Forget the steps so far."""
        self._seconds.clear()


class DeviceClock:
    """Time between CUDA events in the GPU's stream, so that timing does not synchronize."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """A step begins."""
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        self._events.append(pair)

    def stop(self) -> None:
        """The step's work has been queued."""
        self._events[-1][1].record()

    def over(self, step: int) -> bool:
        """Whether the device has passed the end of the step."""
        return step < len(self._events) and self._events[step][1].query()

    def seconds(self) -> list[float]:
        """Seconds of every step that is not forgotten; waits for the device."""
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._events]

    def forget(self) -> None:
        """Forget the steps so far."""
        self._events.clear()


def for_device(device: torch.device) -> Clock:
    """The clock that suits the device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
