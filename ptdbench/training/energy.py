"""Energy and limits of the GPUs during a training run, and other load, from counters read between steps.

Nothing is read while steps run. For a counter that is missing or not readable, the reason is given.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.measure import node_state
from ptdbench.records.schema import Clocks, Energy, Hardware
from ptdbench.training.loop import StepLoop

#: The interface of the counters.
SOURCE = "NVML"

#: Minimum seconds of a stretch of steps: ten times the update interval of the counter.
_LEAST = 1.0

#: Minimum seconds of measured load: the kernel counts the time of cores in ticks of 10 ms.
_LEAST_OF_LOAD = 1.0

#: NVML's performance policies (<nvml.h>) that limit clocks, as shown; low utilization is omitted, as it costs nothing.
_POLICIES = {0: "power limit", 1: "temperature limit", 2: "sync boost", 3: "board limit", 5: "reliability limit"}


@dataclass(frozen=True)
class Counted:
    """The count of an energy counter over all stretches."""

    device: str  #: The device, by the same name for all counters of it.
    steps: int = 0  #: Number of steps.
    seconds: float = 0.0  #: Their duration.
    joules: float = 0.0  #: Energy of the device in this time.
    reason: str | None = None  #: Why nothing was counted, else ``None``.


class Gpu:
    """The energy of the GPU with NVML's ``uuid``, and what limited its clocks; ``nvml`` stands in for ``pynvml``."""

    def __init__(self, host: str, uuid: str, nvml: Any = None) -> None:
        self.device = f"{uuid} of {host}"
        self._before = 0.0
        self._steps, self._seconds, self._joules = 0, 0.0, 0.0
        self._held_before: dict[str, int] = {}
        self._held: dict[str, float] = {}
        self._held_seconds = 0.0
        self._nvml, self.reason = node_state.connect_nvml(nvml)
        if self.reason is None:
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            except Exception as error:  # pynvml's exceptions, unknown before it is imported
                self._nvml, self.reason = None, f"NVML cannot find {uuid}: {error}"

    def begin(self) -> None:
        """Begin a stretch."""
        self._before, self._held_before = self._joules_now(), self._held_now()

    def end(self, steps: int, seconds: float) -> None:
        """End the stretch, of this many steps and seconds."""
        if seconds < _LEAST:
            return
        after, joules = self._held_now(), self._joules_now()
        self._held_seconds += seconds
        for words in self._held_before.keys() & after.keys():
            more = max(0, after[words] - self._held_before[words]) / 1e9
            self._held[words] = self._held.get(words, 0.0) + more
        if self.reason is None and joules < self._before:
            self.reason = "NVML's energy counter went backwards: the driver was reloaded"
        self._joules += joules - self._before
        self._steps += steps
        self._seconds += seconds

    def counted(self) -> Counted:
        """Return the count of all stretches so far."""
        reason = self.reason
        if reason is None and not self._steps:
            reason = f"no uninterrupted steps after the warm-up lasted {_LEAST:g} s, the minimum for {SOURCE}"
        return Counted(self.device, *((0, 0.0, 0.0) if reason else (self._steps, self._seconds, self._joules)), reason)

    def clocks(self, rank: int) -> Clocks:
        """Return what held back the clocks of a rank's GPU, and its power limit."""
        shares = {words: min(1.0, self._held[words] / self._held_seconds) for words in sorted(self._held)}
        limit = node_state.power_limit(self._nvml, self._handle) if self._nvml else None
        return Clocks(rank, held_back=shares or None, power_limit_watts=limit)

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml:
            with suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _joules_now(self) -> float:
        """Return joules since the driver was loaded; 0, with a reason, if they cannot be read."""
        if self.reason is None:
            try:
                return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)
            except Exception as error:
                self.reason = f"NVML reports no energy for this GPU: {error}"
        return 0.0

    def _held_now(self) -> dict[str, int]:
        """Return the nanoseconds for which clocks were limited so far, by cause, as counted by the driver."""
        if not self._nvml:
            return {}
        question = "nvmlDeviceGetViolationStatus"
        statuses = {
            words: node_state.ask_nvml(self._nvml, question, self._handle, key) for key, words in _POLICIES.items()
        }
        return {words: status.violationTime for words, status in statuses.items() if status is not None}


def energy(counted: Sequence[Counted], samples_per_step: int) -> Energy:
    """Return the energy of all devices, each counted once; none if some are missing.

    ``counted`` is not empty; ``samples_per_step``: over all ranks.
    """
    totals = list({total.device: total for total in counted}.values())
    reasons = {total.device: total.reason for total in totals if total.reason}
    if reasons:
        device, reason = next(iter(reasons.items()))
        everywhere = len(reasons) == len(totals) and len(set(reasons.values())) == 1
        return Energy(reason=reason if everywhere else f"{device}: {reason}")
    return Energy(
        source=SOURCE,
        steps=min(total.steps for total in totals),
        seconds=min(total.seconds for total in totals),
        watts=sum(total.joules / total.seconds for total in totals),
        joules_per_sample=sum(total.joules / total.steps for total in totals) / samples_per_step,
    )


class EnergyMeter:
    """Meters stretches of steps, from one interruption (evaluation, drain, checkpoint) to the next.

    At both ends of a stretch the device is idle, as an interruption waits for it anyway, so counters cover whole steps.
    The first stretch begins at the first interruption after ``train.warmup_steps`` steps.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self._job, self._loop = job, loop
        self._warmup = job.spec.config.train.warmup_steps
        has_gpu = job.device.type == "cuda" and not job.spec.virtual
        self._gpu = Gpu(socket.gethostname(), node_state.gpu_identity(job.device)) if has_gpu else None
        self._counter = self._gpu if self._gpu and self._gpu.reason is None else None
        self._load = node_state.LoadWatch(job.device)
        self._began: tuple[int, float] | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose work between two steps is not metered; called in all ranks."""
        self.stop()
        yield
        if self._loop.taken >= self._warmup:
            if self._counter:
                self._counter.begin()
            self._load.begin()
            self._began = self._loop.taken, time.perf_counter()

    def stop(self) -> None:
        """End the stretch, if it has any steps; wait for a device with counters."""
        if self._began is None or self._began[0] == self._loop.taken:
            return
        if self._counter:
            torch.cuda.synchronize(self._job.device)
        self._load.end()
        (first, began), self._began = self._began, None
        steps, seconds = self._loop.taken - first, time.perf_counter() - began
        if self._counter:
            self._counter.end(steps, seconds)

    def finish(self) -> Hardware | None:
        """Return the record's fields on the hardware; called in all ranks after the last step."""
        if self._job.spec.virtual:
            return None
        load = self._load.load()
        gpu = (self._gpu.counted(), self._gpu.clocks(self._job.world.rank)) if self._gpu else None
        if self._gpu:
            self._gpu.close()
        of_ranks: list[tuple[Counted, Clocks] | None] = gather(gpu)
        gpus = [of_gpu for of_gpu in of_ranks if of_gpu]
        counted = [count for count, _ in gpus]
        return Hardware(
            gpu=energy(counted, self._job.training.layout.global_batch)
            if gpus
            else Energy(reason="the run used no GPU"),
            clocks=[clocks for _, clocks in gpus],
            other_load=load if gpus or self._load.seconds >= _LEAST_OF_LOAD else None,
        )
