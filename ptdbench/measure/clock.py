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

    def finished(self) -> int:
        """How many of the steps that are not forgotten the device has finished; never blocks, and in any thread."""

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

    def finished(self) -> int:
        """How many steps are timed."""
        return len(self._seconds)

    def seconds(self) -> list[float]:
        """Seconds of every step that is not forgotten."""
        return list(self._seconds)

    def forget(self) -> None:
        """Forget the steps so far."""
        self._seconds.clear()


class DeviceClock:
    """Time between CUDA events in the GPU's stream, so that timing does not synchronize."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._passed = self._steps, 0

    def start(self) -> None:
        """A step begins."""
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """The step's work has been queued."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._steps.append((self._begin, end))  # not before it is recorded: an event that is not counts as passed

    def over(self, step: int) -> bool:
        """Whether the device has passed the end of the step."""
        return step < len(self._steps) and self._steps[step][1].query()

    def finished(self) -> int:
        """How many steps the device has passed the end of, in the order of its stream."""
        steps = self._steps
        of, passed = self._passed
        passed = passed if of is steps else 0
        while passed < len(steps) and steps[passed][1].query():
            passed += 1
        self._passed = steps, passed
        return passed

    def seconds(self) -> list[float]:
        """Seconds of every step that is not forgotten; waits for the device."""
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._steps]

    def forget(self) -> None:
        """Forget the steps so far."""
        self._steps = []


def for_device(device: torch.device) -> Clock:
    """The clock that suits the device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
