"""Timing: clocks, repetitions on all ranks, and statistics of times that do not assume a normal distribution.

As in nccl-tests, ranks synchronize at a barrier before a block of repetitions but not between them. Every repetition
is timed on every rank, and takes as long as its slowest rank; ranks compare their lists after the block.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ptdbench.launch.collect import gather, most
from ptdbench.measure.memory import host_memory
from ptdbench.measure.results import StepSeconds
from ptdbench.problems import ConfigError, Problem, at_least


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


def clock_for(device: torch.device) -> Clock:
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


#: About the clock's resolution: avoids division by zero.
_TICK = 1e-9

Step = Callable[[], object]  # what is timed


@dataclass(frozen=True)
class Effort:
    """The effort for one figure."""

    seconds: float = 0.03  #: Target duration of the timed repetitions.
    min_repetitions: int = 5  #: Minimum number of timed repetitions.
    max_repetitions: int = 1000  #: Maximum number of timed repetitions.
    warmup: int = 2  #: Untimed repetitions, at least one; the fastest one determines how many fit into ``seconds``.
    max_seconds: float = 1.0  #: Fewer than ``min_repetitions``, but at least one, if they would take longer.

    def repetitions(self, once: float) -> int:
        """Return the number of timed repetitions of something that takes ``once`` seconds."""
        once = max(once, _TICK)
        wanted = max(self.min_repetitions, min(self.max_repetitions, self.seconds / once))
        return int(max(1, min(wanted, self.max_seconds / once)))


def problems(options: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the sizes and the effort in a workload's options."""
    counts = ("warmup", "min_bytes", "max_bytes", "min_repetitions", "max_repetitions")
    bounds = (("min_bytes", "max_bytes"), ("min_repetitions", "max_repetitions"))
    rules = [*((options[name] > 0, name, "must be greater than 0") for name in ("seconds", "max_seconds"))]
    rules += [(options[low] <= options[high], high, f"must be at least {low}, {options[low]}") for low, high in bounds]
    of_counts = at_least(1, **{name: options[name] for name in counts}) + at_least(2, factor=options["factor"])
    return of_counts + [Problem(option, options[option], rule) for holds, option, rule in rules if not holds]


def single_rank(workload: str, world_size: int) -> Problem | None:
    """Return a problem if a single rank is to measure messages."""
    remedy = "try cluster.ranks_per_node=2, or more nodes"
    return Problem("workload", workload, "needs at least two ranks", remedy) if world_size < 2 else None


def sizes(min_bytes: int, max_bytes: int, factor: int) -> list[int]:
    """Return sizes from ``min_bytes``, each ``factor`` times the previous, with ``max_bytes`` always last."""
    smaller = []
    size = min_bytes
    while size < max_bytes:
        smaller.append(size)
        size *= factor
    return [*smaller, max_bytes]


def require_memory(device: torch.device, local_size: int, need: int, option: str, value: object) -> None:
    """Require ``need`` bytes of free memory on each rank; called in all ranks, with the ranks on the node.

    Raise ConfigError for ``option`` on all ranks together, naming the rank with the least free memory.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of an earlier run, which otherwise counts as used
        free, where = torch.cuda.mem_get_info(device)[0], "on its GPU"
    else:
        free, where = host_memory().available // local_size, "as its share of the node"
    room = gather((free, where))
    rank = min(range(len(room)), key=lambda number: room[number][0])
    least, place = room[rank]
    if need > least:
        rule = f"needs {need / 2**30:.3g} GiB per rank, but rank {rank} has {least / 2**30:.3g} GiB free {place}"
        raise ConfigError([Problem(option, value, rule, "try less")])


def repeat(step: Step | None, device: torch.device, effort: Effort) -> list[float]:
    """Return the seconds of every timed repetition on its slowest rank; called in all ranks, with the same result.

    ``step``: ``None`` on ranks that only wait.
    """
    dist.barrier()
    once = min(most(*timed(step, effort.warmup, device)))
    dist.barrier()
    return most(*timed(step, effort.repetitions(once), device))


def timed(step: Step | None, count: int, device: torch.device, between: Step = lambda: None) -> list[float]:
    """Return the seconds of ``count`` repetitions on this rank, zeros for ``None``; ``between`` runs before each."""
    if step is None:
        return [0.0] * count
    watch = clock_for(device)
    for _ in range(count):
        between()
        watch.start()
        step()
        watch.stop()
    return watch.seconds()


def warmup_end(step_seconds: Sequence[float], minimum: int) -> int:
    """Return the number of leading warm-up steps, by the MSER rule.

    MSER drops the first ``d`` steps, where ``d`` minimizes the standard error of the remaining mean,
    ``argmin_d sum_{i >= d} (x_i - mean_d)^2 / (n - d)^2`` (K. P. White, "An effective truncation heuristic for bias
    reduction in simulation output", Simulation 69(6), 1997). ``d`` and ``minimum`` are limited to the first half, as
    near the end the estimate is based on too few steps.
    """
    count = len(step_seconds)
    last = count // 2
    first = min(minimum, last)
    if first == last:
        return first
    # Running sums from the end give every candidate in one pass; centering avoids cancellation.
    centered = np.asarray(step_seconds, dtype=np.float64) - np.median(step_seconds)
    remaining = np.arange(count, 0, -1)
    total = np.cumsum(centered[::-1])[::-1]
    squares = np.cumsum(centered[::-1] ** 2)[::-1]
    mser = (squares - total**2 / remaining) / remaining**2
    return first + int(np.argmin(mser[first : last + 1]))


def warmup_ends(starts: Sequence[Sequence[float]], minimum: int) -> list[int]:
    """Return the number of leading warm-up steps of each start of a run, given the seconds of its steps.

    A single start has :func:`warmup_end`. Of several starts, whose other steps are timed together, a short one drops
    its full warm-up, even if nothing remains, as its slow first steps would count among the others.
    """
    ends = [warmup_end(start, minimum) for start in starts]
    full = [min(len(start), max(1, minimum, end)) for start, end in zip(starts, ends, strict=True)]
    return full if sum(map(len, starts)) > sum(full) and sum(len(start) > 0 for start in starts) > 1 else ends


def summary(seconds: Sequence[float]) -> StepSeconds:
    """Summarize location and spread of step times; quantiles interpolate linearly. All are ``None`` without steps."""
    if not len(seconds):
        return StepSeconds()
    times = np.asarray(seconds, dtype=np.float64)
    p5, median, p95 = np.quantile(times, (0.05, 0.5, 0.95)).tolist()
    return StepSeconds(median, float(times.mean()), p5, p95, median_interval(seconds))


def median_of(times: StepSeconds) -> float:
    """Return the median of times that are not empty."""
    assert times.median is not None
    return times.median


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Return a distribution-free 95 % confidence interval of the median, from order statistics.

    The median of the distribution lies outside ``[x_(k), x_(n+1-k)]`` with probability ``2 P(Binomial(n, 1/2) < k)``
    (David and Nagaraja, "Order Statistics", 3rd edition, section 7.1); ``k`` is the largest for which that is at most
    5 %. This assumes independent values; with correlated steps the true interval is wider. ``None`` below six values,
    whose whole range covers less than 95 %.
    """
    count = len(values)
    of_any = math.lgamma(count + 1) - count * math.log(2)
    outside, rank = 0.0, -1
    while outside <= 0.05:
        rank += 1
        outside += 2 * math.exp(of_any - math.lgamma(rank + 1) - math.lgamma(count - rank + 1))
    if rank == 0:
        return None
    ordered = sorted(values)
    return [float(ordered[rank - 1]), float(ordered[count - rank])]
