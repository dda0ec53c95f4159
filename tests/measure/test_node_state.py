"""The state of a node: its GPUs by NVML, and what other processes take."""

import multiprocessing
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from ptdbench.measure import node_state
from ptdbench.measure.node_state import Spent, cores_taken
from ptdbench.measure.results import OtherLoad


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
    assert gpu.throttles == ["too hot (hardware)"]
    assert (gpu.power_limit_watts, gpu.power_limit_default_watts) == (600, None)
    assert (gpu.temperature_celsius, gpu.processes, gpu.near_cores) == (71, 2, [0, 2, 64])


def test_links_are_told_apart():
    links = node_state.inspect_gpus(made()).links
    one_way = {(0, 1): "NV2", (0, 2): 30, (0, 3): 30, (1, 2): 50, (1, 3): 30, (2, 3): "NV3"}
    both_ways = one_way | {(target, source): link for (source, target), link in one_way.items()}
    assert links == {(f"GPU-{source}", f"GPU-{target}"): link for (source, target), link in both_ways.items()}


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


class Times(NamedTuple):
    """The seconds of a core, as psutil has them on Linux."""

    user: float = 0.0
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    irq: float = 0.0
    steal: float = 0.0


def load(cores=2, taken=0.0, gpu_ranks=(), on_gpu=False):
    return OtherLoad("n1", cores, taken, list(gpu_ranks), on_gpu)


def test_user_nice_system_and_steal_are_busy(monkeypatch):
    counters = [Times(100, 20, 30, 400, 7, 8), Times(idle=1.0)]
    monkeypatch.setattr(node_state.psutil, "cpu_times", lambda percpu: counters)
    assert node_state._spent([1, 0, 99]) == {0: (158, 565), 1: (0.0, 1.0)}


@pytest.mark.parametrize(("ranks", "expected"), [
    ([Spent(10.0, cpu, {0: 9.0, 1: 10.0}, [0, 1]) for cpu in (4.0, 4.0)], (2, pytest.approx(1.1))),
    ([Spent(10.0, 9.0, {0: 9.0}, [0]), Spent(5.0, 2.0, {1: 5.0}, [1])], (2, pytest.approx(0.6))),  # cores apart
    ([Spent(1.0, 1.01, {0: 1.0}, [0])], (1, 0.0)),  # a rank's own time is exact, that of a core counted in ticks
    ([Spent(1.0, 1.0, {0: 1.0}, [0, 1])], (2, None)),  # a core without counters says nothing
    ([Spent(0.0, 0.0, {}, [0])], (1, None)),  # nor does a run whose steps were all warm-up
])  # fmt: skip
def test_taken_is_what_the_ranks_did_not_take_themselves(ranks, expected):
    assert cores_taken(ranks) == expected


@pytest.mark.parametrize(
    ("cores", "others", "is_busy"),
    [(2, 0.09, False), (2, 0.11, True), (2, None, False), (128, 0.6, False), (128, 0.7, True)],
)
def test_a_node_is_busy_from_a_tenth_of_a_core_on_or_half_a_percent_of_many(cores, others, is_busy):
    assert load(cores, others).is_busy == load(cores, others).slows(0) == is_busy


def test_on_gpus_the_gpus_count_and_the_cores_do_not():
    assert not load(taken=2.0, on_gpu=True).is_busy
    shared = load(gpu_ranks=[3], on_gpu=True)
    assert (shared.is_busy, shared.slows(3), shared.slows(2)) == (True, True, False)
    assert str(shared) == "other processes use the GPU of rank 3"
    assert str(load(gpu_ranks=[3, 4], on_gpu=True)) == "other processes use the GPUs of ranks 3, 4"
    assert str(load(taken=1.14)) == "other processes took 1.1 of 2 cores"


@pytest.fixture
def observed(monkeypatch):
    """A watch of one rank on cores 0 and 1, whose own CPU time stands still, by given counters and times."""

    def watch(counters, times):
        clock = iter(times)
        monkeypatch.setattr(node_state.psutil, "cpu_times", mock.Mock(side_effect=counters))
        monkeypatch.setattr(node_state, "gather", lambda value: [value])
        monkeypatch.setattr(node_state, "node", lambda environ: "n1")
        monkeypatch.setattr(node_state.settings, "own_cores", lambda: frozenset({0, 1}))
        monkeypatch.setattr(node_state, "time", SimpleNamespace(perf_counter=lambda: next(clock), process_time=float))
        return node_state.LoadWatch(torch.device("cpu"))

    return watch


BEGAN = [Times(5.0, idle=7.0), Times()]


@pytest.mark.parametrize(
    ("counters", "taken"),
    [
        ((BEGAN, [Times(15.0, idle=7.0), Times(system=5.0, idle=10.0)]), pytest.approx(1.5)),
        ((BEGAN, BEGAN), None),  # they stand still
        (([], []), None),
    ],
)
def test_what_others_took_is_the_difference_of_counters_over_the_seconds_between(observed, counters, taken):
    assert observed(counters, [100.0, 110.0]).stop() == [OtherLoad("n1", 2, taken, [], False)]


def test_what_happens_between_stretches_does_not_count(observed):
    """Two stretches of 10 s, with 1 and 2 busy cores, and a pause in which all were busy."""
    counters = [[Times(zero, idle=idle), Times(one, idle=idle)] for zero, one, idle in [
        (0, 0, 0), (0, 0, 1), (10, 0, 10), (90, 80, 11), (100, 90, 20),
    ]]  # fmt: skip
    watch = observed(counters, [0.0, 1.0, 11.0, 91.0, 101.0])
    for _ in range(2):
        watch.begin()
        watch.end()
    assert watch.seconds == 20.0
    assert [load.taken for load in watch.load()] == [pytest.approx(1.5)]


def spin(seconds, done, leave):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    done.set()
    leave.wait()


def test_workers_are_ones_own_and_a_gpu_with_more_processes_is_shared():
    before, done, leave = node_state._cpu_seconds(), multiprocessing.Event(), multiprocessing.Event()
    worker = multiprocessing.Process(target=spin, args=(0.3, done, leave), daemon=True)
    worker.start()
    done.wait()
    assert node_state._cpu_seconds() - before > 0.25
    leave.set()
    worker.join()
    spent = Spent(1.0, 0.5, {0: 1.0}, [0])
    told = [("n1", spent, "GPU-a", 1), ("n1", spent, "GPU-b", 2), ("n2", spent, "GPU-c", 2), ("n2", spent, "GPU-c", 2)]
    assert node_state._of_node("n1", told, on_gpu=True).gpu_ranks == [1]
    assert node_state._of_node("n2", told, on_gpu=True).gpu_ranks == []
