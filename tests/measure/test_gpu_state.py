"""What NVML is asked, with a stand-in that answers as ``pynvml`` does: there may be no GPU here."""

import sys
from types import SimpleNamespace
from unittest import mock

from msgspec.structs import replace

from ptdbench.measure import node_state


def made(**others) -> SimpleNamespace:
    """Four GPUs: 0 and 1 have two direct NVLinks, 2 and 3 have three each to a switch, and the rest is PCI."""
    ends = ({0: "bus1", 1: "bus1"}, {0: "bus0", 1: "bus0"}, *[dict.fromkeys(range(3), "sw")] * 2)
    calls: list[str] = []
    answers = {
        "NVML_TEMPERATURE_GPU": 0, "NVML_NVLINK_MAX_LINKS": 4,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2, "NVML_P2P_STATUS_OK": 0,
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode(),  # old versions of pynvml give bytes
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"bus{handle}"),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4 | 0x40 | 0x800,  # and not the newer name
        "nvmlDeviceGetTemperature": lambda handle, sensor: 71,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 600_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": mock.Mock(side_effect=RuntimeError("Not Supported")),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=1), SimpleNamespace(pid=2)],
        "nvmlDeviceGetCpuAffinity": lambda handle, words: [0b101, 0b1, *[0] * (words - 2)],
        "nvmlDeviceGetNvLinkState": lambda handle, link: int(link in ends[handle]),
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: SimpleNamespace(busId=ends[handle][link]),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0 if {one, other} == {2, 3} else 5,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 50 if {one, other} == {1, 2} else 30,
    }  # fmt: skip
    return SimpleNamespace(calls=calls, **{**answers, **others})


def test_a_gpu_is_described_and_what_it_does_not_tell_is_missing():
    gpu = node_state.inspect_gpus(made()).gpus[1]
    assert (gpu.uuid, gpu.bus) == ("GPU-1", "bus1")
    assert gpu.clock_reasons == ["power cap", "too hot (hardware)"]
    assert (gpu.power_limit_watts, gpu.power_limit_default_watts) == (600, None)
    assert (gpu.temperature_celsius, gpu.processes, gpu.near_cores) == (71, 2, [0, 2, 64])


def test_links_are_named_as_nvidia_smi_names_them():
    seen = node_state.inspect_gpus(made())
    assert seen.links == [
        ["SELF", "NV2", "PHB", "PHB"], ["NV2", "SELF", "SYS", "PHB"], ["PHB", "SYS", "SELF", "NV3"],
        ["PHB", "PHB", "NV3", "SELF"],
    ]  # fmt: skip
    assert seen.link(seen.gpus[2], seen.gpus[1]) == "SYS"
    assert seen.link(seen.gpus[2], replace(seen.gpus[1], uuid="GPU-of-another-node")) is None


def test_nvml_is_shut_down_and_a_node_without_it_says_so(monkeypatch):
    whole, broken = made(), made(nvmlDeviceGetCount=lambda: 1 / 0)
    assert node_state.inspect_gpus(whole).reason is None
    assert node_state.inspect_gpus(broken).reason == "NVML does not answer: division by zero"
    assert whole.calls == broken.calls == ["init", "shutdown"]
    nvml = made(nvmlInit=mock.Mock(side_effect=RuntimeError("NVML Shared Library Not Found")))
    assert node_state.inspect_gpus(nvml) == node_state.Gpus(
        reason="NVML does not answer: NVML Shared Library Not Found"
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert node_state.inspect_gpus().reason == "the package nvidia-ml-py is not installed"
