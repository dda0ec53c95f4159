"""Clocks that time steps between ``start`` and ``stop``, and a stopwatch for the milestones of a run."""

import time

import torch


class Clock:
    """Times steps by the wall clock of the host, for devices that work synchronously."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End the step, once its work is done, or on a GPU queued."""
        self._seconds.append(time.perf_counter() - self._started)

    def finished(self) -> int:
        """Count the steps since :meth:`forget` that the device has finished; never blocks, and is thread-safe."""
        return len(self._seconds)

    def seconds(self) -> list[float]:
        """Return the seconds of every step since :meth:`forget`; wait for the device."""
        return list(self._seconds)

    def forget(self) -> None:
        """Forget the steps so far; the next one is step 0."""
        self._seconds.clear()


class DeviceCount:
    """A count of finished steps that the device writes to host memory, in its stream.

    Reading it makes no CUDA call: torch holds the GIL in ``cudaEventQuery``, which may hang, with every thread of the
    rank, while another thread waits for the device (pytorch/pytorch#130844).
    """

    def __init__(self) -> None:
        self._device = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._read = self._host.numpy()

    def mark(self, number: int) -> None:
        """Let the device write this number when its stream gets here."""
        self._device.fill_(number)
        self._host.copy_(self._device, non_blocking=True)

    def number(self) -> int:
        """Return the number that the device wrote last."""
        return int(self._read[0])


class _DeviceClock(Clock):
    """Time between CUDA events in the GPU's stream; timing does not synchronize."""

    def __init__(self) -> None:
        self._begin: torch.cuda.Event | None = None
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._count = DeviceCount()
        self._forgotten = 0

    def start(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        assert self._begin
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._steps.append((self._begin, end))
        self._count.mark(self._forgotten + len(self._steps))

    def finished(self) -> int:
        return max(0, self._count.number() - self._forgotten)

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._steps]

    def forget(self) -> None:
        self._forgotten += len(self._steps)
        self._steps = []


def for_device(device: torch.device) -> Clock:
    """Return the clock that suits the device."""
    return _DeviceClock() if device.type == "cuda" else Clock()


class Stopwatch:
    """Seconds between milestones; the start, in seconds since the epoch, may be in another process."""

    def __init__(self, started: float) -> None:
        self.laps: dict[str, float] = {}  #: Seconds by milestone.
        self._last = started

    def lap(self, name: str) -> None:
        """Record the time since the last lap under ``name``."""
        now = time.time()
        self.laps[name] = now - self._last
        self._last = now
