"""The state of a node's GPUs from NVML: clocks, limits, processes, and links.

Requires the package ``nvidia-ml-py``. Values that a GPU or driver does not report are ``None``. Nothing here
initializes CUDA or changes settings.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct

#: NVML's reasons why a GPU does not run at its highest clock: bits of <nvml.h>, in words.
CLOCK_REASONS = {
    0x1: "idle",
    0x2: "clocks set by hand",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}

#: Reasons that a sound GPU never reports; large products reach the power cap on any GPU.
THROTTLES = frozenset({"hardware slowdown", "too hot (software)", "too hot (hardware)", "power brake"})

#: NVML's closest common ancestor of two GPUs, in the terms of ``nvidia-smi topo -m``.
_ANCESTORS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

_WORD_BITS = 64
_MOST_CORES = 4096


class Gpu(Struct):
    """The state of one GPU; ``None``: not reported."""

    uuid: str | None
    bus: str | None
    clock_reasons: list[str] | None
    temperature_celsius: int | None
    power_limit_watts: float | None
    power_limit_default_watts: float | None
    processes: int | None
    near_cores: list[int] | None


class Gpus(Struct):
    """The GPUs of a node."""

    gpus: list[Gpu] = []  #: In NVML's order.
    #: For each pair ``NV<links>`` for NVLink, else ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS`` as in
    #: ``nvidia-smi topo -m``.
    links: list[list[str | None]] = []
    reason: str | None = None  #: Why both are empty.

    def get(self, uuid: str | None) -> Gpu | None:
        """Return a GPU of this node."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def link(self, source: Gpu, target: Gpu) -> str | None:
        """Return the link between two GPUs, if both are in this node."""
        uuids = [gpu.uuid for gpu in self.gpus]
        if source.uuid not in uuids or target.uuid not in uuids:
            return None
        return self.links[uuids.index(source.uuid)][uuids.index(target.uuid)]


def inspect(nvml: Any = None) -> Gpus:
    """Inspect the GPUs of this node; ``nvml`` replaces the module ``pynvml``."""
    nvml, reason = connect(nvml)
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


def connect(nvml: Any = None) -> tuple[Any, str | None]:
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


def identity(device: torch.device) -> str:
    """Return NVML's identity of this GPU, or the PCI address of an AMD GPU."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs omit the PCI address
    if torch.version.hip:
        return f"PCI-{properties.pci_domain_id:x}:{properties.pci_bus_id:x}:{properties.pci_device_id:x}"
    return f"GPU-{properties.uuid}"


def clock_reasons_now(nvml: Any, handle: Any) -> list[str] | None:
    """Return what limits the clocks of a GPU now, in words; ``None`` if it is not reported."""
    bits = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # drivers before 535 only know the older name
        bits = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else [words for bit, words in CLOCK_REASONS.items() if bits & bit]


def _gpu(nvml: Any, handle: Any) -> Gpu:
    def query(question: str, *arguments: Any) -> Any:
        return ask(nvml, question, handle, *arguments)

    processes, place = query("nvmlDeviceGetComputeRunningProcesses"), query("nvmlDeviceGetPciInfo")
    mask = query("nvmlDeviceGetCpuAffinity", _MOST_CORES // _WORD_BITS)  # words of bits
    near = mask and [core for core in range(_MOST_CORES) if mask[core // _WORD_BITS] >> core % _WORD_BITS & 1]
    return Gpu(
        uuid=_text(query("nvmlDeviceGetUUID")),
        bus=_text(place.busId) if place else None,
        clock_reasons=clock_reasons_now(nvml, handle),
        temperature_celsius=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_limit_watts=power_limit(nvml, handle),
        power_limit_default_watts=_watts(query("nvmlDeviceGetPowerManagementDefaultLimit")),
        processes=None if processes is None else len(processes),
        near_cores=near,
    )


def power_limit(nvml: Any, handle: Any) -> float | None:
    """Return the power limit of a GPU in watts; ``None`` if it is not reported."""
    return _watts(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle))


def _links(nvml: Any, handles: Sequence[Any], gpus: Sequence[Gpu]) -> list[list[str | None]]:
    ends = [_nvlink_ends(nvml, handle) for handle in handles]

    def between(source: int, target: int) -> str | None:
        if source == target:
            return "SELF"
        direct = ends[source].count(gpus[target].bus)
        if direct:
            return f"NV{direct}"
        pair = handles[source], handles[target]
        over = ask(nvml, "nvmlDeviceGetP2PStatus", *pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if ends[source] and over == nvml.NVML_P2P_STATUS_OK:  # through a switch, which uses all links of both
            return f"NV{min(len(ends[source]), len(ends[target]))}"
        ancestor = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", *pair)
        return None if ancestor is None else _ANCESTORS.get(ancestor)

    return [[between(source, target) for target in range(len(handles))] for source in range(len(handles))]


def _nvlink_ends(nvml: Any, handle: Any) -> list[str | None]:
    """List the bus addresses of the remote ends of all NVLinks that are up."""
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    up = [number for number in links if ask(nvml, "nvmlDeviceGetNvLinkState", handle, number)]
    others = [ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number) for number in up]
    return [_text(other.busId) if other else "unknown" for other in others]


def ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Return NVML's answer, or ``None`` if the GPU, driver or ``pynvml`` does not support the query."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:
        return None


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
