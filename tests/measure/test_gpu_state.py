"""What NVML is asked, with a stand-in that answers as ``pynvml`` does: there may be no GPU here."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from ptdbench.measure import gpu_state


class NotSupported(Exception):
    """As pynvml raises where a GPU has no answer."""


class Nvml:
    """Four GPUs: 0 and 1 have two direct NVLinks, 2 and 3 have three each to a switch, and the rest is PCI."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_NVLINK_MAX_LINKS, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 4, 2, 0
    _ends = ({0: "bus1", 1: "bus1"}, {0: "bus0", 1: "bus0"}, *[dict.fromkeys(range(3), "sw")] * 2)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def nvmlInit(self):
        self.calls.append("init")

    def nvmlShutdown(self):
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self):
        return 4

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}".encode()  # old versions of pynvml give bytes

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"bus{handle}")

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return {1: 1980}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # and not the newer name
        return 0x4 | 0x40

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 71

    def nvmlDeviceGetPowerUsage(self, handle):
        raise NotSupported

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 600_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 700_000

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]

    def nvmlDeviceGetCpuAffinity(self, handle, words):
        return [0b101, 0b1, *[0] * (words - 2)]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return int(link in self._ends[handle])

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return SimpleNamespace(busId=self._ends[handle][link])

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0 if {one, other} == {2, 3} else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50 if {one, other} == {1, 2} else 30


def test_a_gpu_is_described_and_what_it_does_not_tell_is_missing():
    gpu = gpu_state.inspect(Nvml())["gpus"][1]
    assert (gpu["uuid"], gpu["bus"], gpu["name"]) == ("GPU-1", "bus1", "NVIDIA H200")
    assert (gpu["sm_clock_mhz"], gpu["sm_clock_most_mhz"], gpu["memory_clock_mhz"]) == (1980, 1980, 3201)
    assert gpu["clock_reasons"] == ["power cap", "too hot (hardware)"]
    assert (gpu["power_limit_watts"], gpu["power_limit_default_watts"], gpu["power_watts"]) == (600, 700, None)
    assert (gpu["temperature_celsius"], gpu["processes"], gpu["near_cores"]) == (71, 2, [0, 2, 64])


def test_links_are_named_as_nvidia_smi_names_them():
    seen = gpu_state.inspect(Nvml())
    assert seen["links"] == [
        ["SELF", "NV2", "PHB", "PHB"],
        ["NV2", "SELF", "SYS", "PHB"],
        ["PHB", "SYS", "SELF", "NV3"],
        ["PHB", "PHB", "NV3", "SELF"],
    ]
    assert gpu_state.link(seen, "GPU-2", "GPU-1") == "SYS"
    assert gpu_state.link(seen, "GPU-2", "GPU-of-another-node") is None


def test_nvml_is_shut_down_whatever_happens():
    whole, broken = Nvml(), Nvml()
    broken.nvmlDeviceGetCount = lambda: 1 / 0  # type: ignore[method-assign]
    assert gpu_state.inspect(whole)["reason"] is None
    assert gpu_state.inspect(broken)["reason"] == "NVML does not answer: division by zero"
    assert whole.calls == broken.calls == ["init", "shutdown"]


def test_a_node_without_a_driver_or_the_package_says_so(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlInit", mock.Mock(side_effect=NotSupported("NVML Shared Library Not Found")))
    expected = {"gpus": [], "links": [], "reason": "NVML does not answer: NVML Shared Library Not Found"}
    assert gpu_state.inspect(nvml) == expected
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state.inspect()["reason"] == "the package nvidia-ml-py is not installed"


@pytest.mark.parametrize(
    ("bits", "words"), [(0, []), (0x1, ["idle"]), (0x88, ["hardware slowdown", "power brake"]), (0x800, [])]
)
def test_clock_reasons(bits, words):
    assert gpu_state.clock_reasons(bits) == words
