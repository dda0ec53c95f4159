"""The state of a node: its GPUs from NVML, and the cores and GPUs that other processes use during a measurement.

NVML, of the package ``nvidia-ml-py``, reports clocks, limits, processes, and links; values that a GPU or driver does
not report are ``None``. Nothing here initializes CUDA or changes settings.

Other load on a CPU is the busy time of the cores by the kernel's counters, minus the CPU time of the ranks; on a GPU,
the processes that NVML lists.
"""

import importlib
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import psutil
import torch
from msgspec import Struct

from ptdbench.launch import settings
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import node
from ptdbench.measure.results import OtherLoad

#: NVML's reasons for lower clocks that a sound GPU never reports: bits of <nvml.h>, in words. The power cap is none:
#: large products reach it on any GPU.
_THROTTLES = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}

_WORD_BITS = 64
_MOST_CORES = 4096


class Gpu(Struct):
    """The state of one GPU; ``None``: not reported."""

    uuid: str | None
    bus: str | None
    throttles: list[str] | None
    temperature_celsius: int | None
    power_limit_watts: float | None
    power_limit_default_watts: float | None
    processes: int | None
    near_cores: list[int] | None


class Gpus(Struct):
    """The GPUs of a node."""

    gpus: list[Gpu] = []  #: In NVML's order.
    #: By the UUIDs of a pair ``NV<links>`` for NVLink, else NVML's number of their closest common ancestor.
    links: dict[tuple[str | None, str | None], str | int | None] = {}
    reason: str | None = None  #: Why both are empty.

    def get(self, uuid: str | None) -> Gpu | None:
        """Return a GPU of this node."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def inspect_gpus(nvml: Any = None) -> Gpus:
    """Inspect the GPUs of this node; ``nvml`` replaces the module ``pynvml``."""
    nvml, reason = connect_nvml(nvml)
    if reason:
        return Gpus(reason=reason)
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        gpus = [_gpu(nvml, handle) for handle in handles]
        return Gpus(gpus, _links(nvml, handles, gpus))
    except Exception as error:
        return Gpus(reason=f"NVML does not answer: {error}")
    finally:
        nvml.nvmlShutdown()


def connect_nvml(nvml: Any = None) -> tuple[Any, str | None]:
    """Connect to NVML, which the caller must shut down; ``nvml`` replaces the module ``pynvml``.

    Return ``(module, None)``, or ``(None, reason)`` if NVML is not available.
    """
    if torch.version.hip and nvml is None:
        return None, "NVML supports only NVIDIA GPUs, not AMD's"
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    except Exception as error:  # pynvml's exceptions, unknown before it is imported
        return None, f"NVML does not answer: {error}"
    return nvml, None


def gpu_identity(device: torch.device) -> str:
    """Return NVML's identity of this GPU, or the PCI address of an AMD GPU."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs omit the PCI address
    if torch.version.hip:
        return f"PCI-{properties.pci_domain_id:x}:{properties.pci_bus_id:x}:{properties.pci_device_id:x}"
    return f"GPU-{properties.uuid}"


def _gpu(nvml: Any, handle: Any) -> Gpu:
    def query(question: str, *arguments: Any) -> Any:
        return ask_nvml(nvml, question, handle, *arguments)

    bits = query("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # drivers before 535 only know the older name
        bits = query("nvmlDeviceGetCurrentClocksThrottleReasons")
    processes, place = query("nvmlDeviceGetComputeRunningProcesses"), query("nvmlDeviceGetPciInfo")
    mask = query("nvmlDeviceGetCpuAffinity", _MOST_CORES // _WORD_BITS)  # words of bits
    near = mask and [core for core in range(_MOST_CORES) if mask[core // _WORD_BITS] >> core % _WORD_BITS & 1]
    return Gpu(
        uuid=_text(query("nvmlDeviceGetUUID")),
        bus=_text(place.busId) if place else None,
        throttles=None if bits is None else [words for bit, words in _THROTTLES.items() if bits & bit],
        temperature_celsius=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_limit_watts=power_limit(nvml, handle),
        power_limit_default_watts=_watts(query("nvmlDeviceGetPowerManagementDefaultLimit")),
        processes=None if processes is None else len(processes),
        near_cores=near,
    )


def power_limit(nvml: Any, handle: Any) -> float | None:
    """Return the power limit of a GPU in watts; ``None`` if it is not reported."""
    return _watts(ask_nvml(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle))


def _links(nvml: Any, handles: Sequence[Any], gpus: Sequence[Gpu]) -> dict[tuple[str | None, str | None], Any]:
    ends = [_nvlink_ends(nvml, handle) for handle in handles]

    def between(source: int, target: int) -> str | int | None:
        direct = ends[source].count(gpus[target].bus)
        if direct:
            return f"NV{direct}"
        pair = handles[source], handles[target]
        over = ask_nvml(nvml, "nvmlDeviceGetP2PStatus", *pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if ends[source] and over == nvml.NVML_P2P_STATUS_OK:  # through a switch, which uses all links of both
            return f"NV{min(len(ends[source]), len(ends[target]))}"
        return ask_nvml(nvml, "nvmlDeviceGetTopologyCommonAncestor", *pair)

    pairs = permutations(range(len(gpus)), 2)
    return {(gpus[source].uuid, gpus[target].uuid): between(source, target) for source, target in pairs}


def _nvlink_ends(nvml: Any, handle: Any) -> list[str | None]:
    """List the bus addresses of the remote ends of all NVLinks that are up."""
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    up = [number for number in links if ask_nvml(nvml, "nvmlDeviceGetNvLinkState", handle, number)]
    others = [ask_nvml(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number) for number in up]
    return [_text(other.busId) if other else "unknown" for other in others]


def ask_nvml(nvml: Any, question: str, *arguments: Any) -> Any:
    """Return NVML's answer, or ``None`` if the GPU, driver or ``pynvml`` does not support the query."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:
        return None


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


#: What counts as busy; ``steal`` is time taken by other virtual machines. Interrupts are ignored, as the ranks' own
#: messages cause some.
_BUSY = ("user", "nice", "system", "steal")


@dataclass(frozen=True)
class Spent:
    """Seconds between two points in time, as measured by one rank."""

    wall: float  #: Wall-clock time.
    cpu: float  #: CPU time of this rank, with all threads and data workers.
    busy: Mapping[int, float]  #: CPU time of all processes by core, except cores whose counters do not advance.
    cores: Sequence[int]  #: The cores that the rank may use.


class LoadWatch:
    """Observes other load during one or several stretches of time, in all ranks; the first one begins at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cores = device, sorted(settings.own_cores())
        self._cpu, self._busy = 0.0, dict[int, float]()
        self._began = self._now()
        self.seconds = 0.0  #: The duration of all stretches.

    def begin(self) -> None:
        """Begin a stretch."""
        self._began = self._now()

    def end(self) -> None:
        """End the stretch."""
        (began, cpu, before), (ended, cpu_now, after) = self._began, self._now()
        self.seconds += ended - began
        self._cpu += cpu_now - cpu
        for core in before.keys() & after.keys():
            (busy, total), (busy_now, total_now) = before[core], after[core]
            if total_now > total:
                self._busy[core] = self._busy.get(core, 0.0) + busy_now - busy

    def stop(self) -> list[OtherLoad]:
        """End the stretch; see :meth:`load`."""
        self.end()
        return self.load()

    def load(self) -> list[OtherLoad]:
        """Return the load of each node over all stretches; called in all ranks, with the same result."""
        spent, gpu, users = Spent(self.seconds, self._cpu, self._busy, self._cores), None, 0
        on_gpu = self._device.type == "cuda"
        if on_gpu:  # which GPU, and how many processes NVML lists for it
            gpu = gpu_identity(self._device)
            users = ((state := inspect_gpus().get(gpu)) and state.processes) or 0
        of_ranks: list[tuple[str, Spent, str | None, int]] = gather((node(os.environ), spent, gpu, users))
        return [_of_node(name, of_ranks, on_gpu) for name in dict.fromkeys(name for name, *_ in of_ranks)]

    def _now(self) -> tuple[float, float, dict[int, tuple[float, float]]]:
        return time.perf_counter(), _cpu_seconds(), _spent(self._cores)


def cores_taken(ranks: Sequence[Spent]) -> tuple[int, float | None]:
    """Return how many cores the ranks of a node may use, and how many of them other processes used on average."""
    busy = {core: seconds / rank.wall for rank in ranks for core, seconds in rank.busy.items()}
    count = len({core for rank in ranks for core in rank.cores})
    of_ranks = sum(rank.cpu / rank.wall for rank in ranks if rank.wall)  # 0 without a stretch, as after a few steps
    return count, max(0.0, sum(busy.values()) - of_ranks) if len(busy) == count else None


def _spent(cores: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return the busy and the total seconds of each of these cores since the machine started, as far as it counts."""
    times = dict(enumerate(psutil.cpu_times(percpu=True)))
    counted = {core: times[core] for core in cores if core in times}
    return {core: (sum(getattr(time, name, 0.0) for name in _BUSY), sum(time)) for core, time in counted.items()}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its workers."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):  # it has ended meanwhile
            spent = psutil.Process(worker.pid).cpu_times()
            seconds += spent.user + spent.system
    return seconds


def _of_node(name: str, of_ranks: Sequence[tuple[str, Spent, str | None, int]], on_gpu: bool) -> OtherLoad:
    ranks = [
        (rank, spent, gpu, processes) for rank, (node, spent, gpu, processes) in enumerate(of_ranks) if node == name
    ]
    count, others = cores_taken([spent for _, spent, _, _ in ranks])
    gpus = [gpu for _, _, gpu, _ in ranks]
    shared = [rank for rank, _, gpu, processes in ranks if gpu and processes > gpus.count(gpu)]
    return OtherLoad(name, count, others, shared, on_gpu)
