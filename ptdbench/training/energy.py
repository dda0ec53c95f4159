"""Energy, clocks and limits of the hardware during a training run, and other load, from counters read between steps.

GPU counters are read through NVML, CPU packages through RAPL (Linux's ``/sys/class/powercap``, also for AMD). Nothing
is read while steps run. For a counter that is missing or not readable, the reason is given.
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import machine
from ptdbench.measure import contention, gpu_state
from ptdbench.records.schema import Clocks, Energy, Hardware
from ptdbench.training.loop import StepLoop

POWERCAP = Path("/sys/class/powercap")

#: An upper bound of a package's power in watts, which limits a stretch so that a counter wraps at most once.
_MAX_WATTS = 2000.0

#: Minimum seconds of measured load: the kernel counts the time of cores in ticks of 10 ms.
_LEAST_OF_LOAD = 1.0

#: NVML's performance policies (<nvml.h>) that limit clocks, in words; not low utilization, which costs nothing.
_POLICIES = {0: "power limit", 1: "temperature limit", 2: "sync boost", 3: "board limit", 5: "reliability limit"}


class Unreadable(Exception):
    """A counter cannot be read, with the reason."""


@dataclass(frozen=True)
class Counted:
    """The count of an energy counter over all stretches."""

    device: str  #: The device, by the same name for all counters of it.
    steps: int = 0  #: Number of steps.
    seconds: float = 0.0  #: Their duration.
    joules: float = 0.0  #: Energy of the device in this time.
    reason: str | None = None  #: Why nothing was counted, else ``None``.


class Counter(ABC):
    """An energy counter, read at both ends of stretches of steps."""

    source = ""  #: The interface of the counter.
    min_seconds = 0.0  #: Minimum duration of a stretch: ten times the update interval of the counter.

    def __init__(self, device: str) -> None:
        self.device = device
        self.reason: str | None = None
        self._before: Sequence[float] = ()
        self._steps, self._seconds, self._joules = 0, 0.0, 0.0

    def begin(self) -> None:
        """Begin a stretch."""
        if self.reason is None:
            try:
                self._before = self._read()
            except Unreadable as error:
                self.reason = str(error)

    def end(self, steps: int, seconds: float) -> None:
        """End the stretch, of this many steps and seconds."""
        if self.reason is not None or seconds < self.min_seconds:
            return
        try:
            self._joules += self._spent(self._before, self._read(), seconds)
        except Unreadable as error:
            self.reason = str(error)
        self._steps += steps
        self._seconds += seconds

    def counted(self) -> Counted:
        """Return the count of all stretches so far."""
        reason = self.reason
        if reason is None and not self._steps:
            least = f"{self.min_seconds:g} s, the minimum for {self.source}"
            reason = f"no uninterrupted steps after the warm-up lasted {least}"
        return Counted(self.device, self._steps, self._seconds, self._joules, reason)

    @abstractmethod
    def _read(self) -> Sequence[float]:
        """Return joules since some point in time, for each part of the device; raise :class:`Unreadable`."""

    @abstractmethod
    def _spent(self, before: Sequence[float], after: Sequence[float], seconds: float) -> float:
        """Return the joules between two readings; raise :class:`Unreadable` if these do not determine them."""


class Packages(Counter):
    """All CPU packages of a machine by RAPL, without memory modules."""

    source = "RAPL"
    min_seconds = 0.1

    def __init__(self, device: str, root: Path | None = None) -> None:
        super().__init__(device)
        root = root or POWERCAP
        try:
            # Parts of packages ("core", "dram") are separate zones, as is the platform ("psys"), which contains them.
            names = sorted(root.glob("intel-rapl:*/name"))
            zones = [name.parent for name in names if name.read_text().startswith("package")]
            self._ranges = [int((zone / "max_energy_range_uj").read_text()) / 1e6 for zone in zones]
            self._files = [(zone / "energy_uj").open("rb", buffering=0) for zone in zones]
        except PermissionError as error:
            self.reason = f"permission denied: cannot read {error.filename}"
        except (OSError, ValueError) as error:
            self.reason = f"cannot read RAPL: {error}"
        else:
            self.reason = None if zones else f"there are no CPU packages in {root} (RAPL)"

    def _read(self) -> Sequence[float]:
        try:
            return [int(os.pread(file.fileno(), 100, 0)) / 1e6 for file in self._files]
        except (OSError, ValueError) as error:
            raise Unreadable(f"cannot read RAPL: {error}") from None

    def _spent(self, before: Sequence[float], after: Sequence[float], seconds: float) -> float:
        if seconds * _MAX_WATTS > (least := min(self._ranges)):
            rule = f"RAPL's counters, which wrap after {least:.0f} J"
            raise Unreadable(f"{seconds:.0f} s without a reading are too long for {rule}")
        ends = zip(before, after, self._ranges, strict=True)
        return sum(last - first + (full if last < first else 0.0) for first, last, full in ends)


class Gpu(Counter):
    """One GPU with its memory, by NVML's ``uuid``, and what limited its clocks; ``nvml`` replaces ``pynvml``."""

    source = "NVML"
    min_seconds = 1.0

    def __init__(self, host: str, uuid: str, nvml: Any = None) -> None:
        super().__init__(f"{uuid} of {host}")
        self._clocks: list[int] = []
        self._seen: dict[str, None] = {}
        self._held_before: dict[str, int] = {}
        self._held: dict[str, float] = {}
        self._held_seconds = 0.0
        self._most: int | None = None
        self._nvml, self.reason = gpu_state.connect(nvml)
        if self.reason is None:
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            except Exception as error:  # pynvml's exceptions, unknown before it is imported
                self._nvml, self.reason = None, f"NVML cannot find {uuid}: {error}"
            else:
                self._most = self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM)

    def look(self) -> None:
        """Note the current clock and the reasons for it, while the GPU works."""
        if self._nvml:
            clock = self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)
            self._clocks += [] if clock is None else [clock]
            self._seen |= dict.fromkeys(gpu_state.clock_reasons_now(self._nvml, self._handle) or ())

    def begin(self) -> None:
        """Begin a stretch."""
        super().begin()
        self._held_before = self._held_now()

    def end(self, steps: int, seconds: float) -> None:
        """End the stretch."""
        super().end(steps, seconds)
        if seconds < self.min_seconds:
            return
        after = self._held_now()
        self._held_seconds += seconds
        for words in self._held_before.keys() & after.keys():
            more = max(0, after[words] - self._held_before[words]) / 1e9
            self._held[words] = self._held.get(words, 0.0) + more

    def clocks(self, rank: int) -> Clocks:
        """Return the clocks of a rank's GPU."""
        shares = {words: min(1.0, self._held[words] / self._held_seconds) for words in sorted(self._held)}
        return Clocks(
            rank,
            sm_clock_mhz=self._clocks[-1] if self._clocks else None,
            sm_clock_least_mhz=min(self._clocks, default=None),
            sm_clock_most_mhz=self._most,
            clock_reasons=list(self._seen) if self._clocks else None,
            held_back=shares or None,
        )

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml:
            with suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _read(self) -> Sequence[float]:
        try:
            return [self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3]
        except Exception as error:
            raise Unreadable(f"NVML reports no energy for this GPU: {error}") from None

    def _spent(self, before: Sequence[float], after: Sequence[float], seconds: float) -> float:
        if after[0] < before[0]:
            raise Unreadable("NVML's energy counter went backwards: the driver was reloaded")
        return after[0] - before[0]

    def _held_now(self) -> dict[str, int]:
        """Return the nanoseconds for which clocks were limited so far, by cause, as counted by the driver."""
        if not self._nvml:
            return {}
        statuses = {words: self._ask("nvmlDeviceGetViolationStatus", policy) for policy, words in _POLICIES.items()}
        return {words: status.violationTime for words, status in statuses.items() if status is not None}

    def _ask(self, question: str, *arguments: Any) -> Any:
        return gpu_state.ask(self._nvml, question, self._handle, *arguments)


def energy(source: str, counted: Sequence[Counted], samples_per_step: int, tokens_per_sample: int | None) -> Energy:
    """Return the energy of all devices, each counted once; none if some are missing.

    ``counted`` is not empty; ``samples_per_step``: over all ranks; ``tokens_per_sample``: ``None`` if samples are not
    token sequences.
    """
    totals = list({total.device: total for total in counted}.values())
    reasons = {total.device: total.reason for total in totals if total.reason}
    if reasons:
        device, reason = next(iter(reasons.items()))
        everywhere = len(reasons) == len(totals) and len(set(reasons.values())) == 1
        return Energy(reason=reason if everywhere else f"{device}: {reason}")
    per_step = sum(total.joules / total.steps for total in totals)
    per_sample = per_step / samples_per_step
    return Energy(
        source=source,
        steps=min(total.steps for total in totals),
        seconds=min(total.seconds for total in totals),
        watts=sum(total.joules / total.seconds for total in totals),
        joules_per_step=per_step,
        joules_per_sample=per_sample,
        joules_per_token=None if tokens_per_sample is None else per_sample / tokens_per_sample,
    )


class EnergyMeter:
    """Meters stretches of steps, from one interruption (evaluation, drain, checkpoint) to the next.

    At both ends of a stretch the device is idle, as an interruption waits for it anyway, so counters cover whole steps;
    only an asynchronous save may still be copying. The first stretch begins at the first interruption after
    ``train.warmup_steps`` steps. Each rank reads its GPU and the time of its cores, and the first rank of each machine
    its CPU packages.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self._job, self._loop = job, loop
        self._warmup = job.spec.config.train.warmup_steps
        host, rank = socket.gethostname(), job.world.rank
        real = not job.spec.virtual  # energy would be of the machine that simulates the GPUs
        machines = gather(machine())
        is_first = machines.index(machines[rank]) == rank
        self._cpu = Packages(f"{host} (rank {rank})") if real and is_first else None
        self._gpu = Gpu(host, gpu_state.identity(job.device)) if real and job.device.type == "cuda" else None
        self._counters = [counter for counter in (self._cpu, self._gpu) if counter and counter.reason is None]
        self._load = contention.Watch(job.device)
        self._began: tuple[int, float] | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose work between two steps is not metered; called in all ranks."""
        self.stop()
        yield
        if self._loop.taken >= self._warmup:
            for counter in self._counters:
                counter.begin()
            self._load.begin()
            self._began = self._loop.taken, time.perf_counter()

    def stop(self) -> None:
        """End the stretch, if it has any steps; wait for a device with counters."""
        if self._began is None or self._began[0] == self._loop.taken:
            return
        if self._gpu and self._counters:
            self._gpu.look()  # while it still works
            torch.cuda.synchronize(self._job.device)
        self._load.end()
        (first, began), self._began = self._began, None
        steps, seconds = self._loop.taken - first, time.perf_counter() - began
        for counter in self._counters:
            counter.end(steps, seconds)

    def finish(self) -> Hardware | None:
        """Return the record's fields on the hardware; called in all ranks after the last step."""
        if self._job.spec.virtual:
            return None
        load = self._load.load()
        cpu = self._cpu.counted() if self._cpu else None
        gpu = (self._gpu.counted(), self._gpu.clocks(self._job.world.rank)) if self._gpu else None
        if self._gpu:
            self._gpu.close()
        of_ranks: list[tuple[Counted | None, tuple[Counted, Clocks] | None]] = gather((cpu, gpu))
        cpus = [counted for counted, _ in of_ranks if counted]
        gpus = [of_gpu for _, of_gpu in of_ranks if of_gpu]
        batch, tokens = self._job.training.layout.global_batch, self._job.training.data.tokens_per_sample
        of_gpus = [counted for counted, _ in gpus]
        return Hardware(
            cpu=energy(Packages.source, cpus, batch, tokens),
            gpu=energy(Gpu.source, of_gpus, batch, tokens) if gpus else Energy(reason="the run used no GPU"),
            clocks=[clocks for _, clocks in gpus],
            other_load=load if gpus or self._load.seconds >= _LEAST_OF_LOAD else None,
        )
