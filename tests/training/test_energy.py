"""Energy and what held clocks back: NVML by a stand-in, as there may be none; which steps are metered."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ptdbench.measure import node_state
from ptdbench.records.schema import Clocks, Energy
from ptdbench.training import energy as module
from ptdbench.training.energy import Counted, EnergyMeter, Gpu, energy

#: As NVML describes it, with another process.
GPU = node_state.Gpu(*[None] * len(node_state.Gpu.__struct_fields__))
GPU.uuid, GPU.processes = "GPU-a", 2


def metered(gpu, *advances, seconds=10.0, steps=5):
    """What the counter counted over one stretch during which these functions ran."""
    gpu.begin()
    for advance in advances:
        advance()
    gpu.end(steps, seconds)
    return gpu.counted()


def made_nvml(*lacks: str) -> SimpleNamespace:
    """NVML with one GPU, GPU-a, in the state that a test sets; ``lacks`` are the questions that it does not answer."""
    nvml = SimpleNamespace(millijoules=5_000, nanoseconds={0: 10**9, 1: 0}, is_up=False)
    answers = {
        "nvmlInit": lambda: setattr(nvml, "is_up", True),
        "nvmlShutdown": lambda: setattr(nvml, "is_up", False),
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-a": "handle"}[uuid],
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: nvml.millijoules,
        "nvmlDeviceGetViolationStatus": lambda handle, policy: SimpleNamespace(violationTime=nvml.nanoseconds[policy]),
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 500_000,
        **dict.fromkeys(lacks, mock.Mock(side_effect=RuntimeError("Not Supported"))),
    }
    vars(nvml).update(answers)
    return nvml


class TestGpu:
    @staticmethod
    def work(nvml, joules=300, held=1.2):
        nvml.millijoules += 1000 * joules
        nvml.nanoseconds[0] += int(held * 1e9)

    def test_energy_and_what_held_the_clocks_back(self):
        nvml = made_nvml()
        gpu = Gpu("n1", "GPU-a", nvml)
        assert metered(gpu, lambda: self.work(nvml)) == Counted("GPU-a of n1", 5, 10.0, 300.0)
        self.work(nvml, joules=1000, held=7)  # between the stretches
        assert metered(gpu, lambda: self.work(nvml, held=0.8)).joules == 600.0
        assert gpu.clocks(0).held_back == {"power limit": pytest.approx(2 / 20), "temperature limit": 0.0}
        assert gpu.clocks(0).power_limit_watts == 500.0
        assert nvml.is_up
        gpu.close()
        assert not nvml.is_up

    def test_a_driver_without_causes_and_a_gpu_without_energy(self):
        nvml = made_nvml("nvmlDeviceGetViolationStatus")
        gpu = Gpu("n1", "GPU-a", nvml)
        metered(gpu)
        assert gpu.clocks(0).held_back is None
        nvml = made_nvml("nvmlDeviceGetTotalEnergyConsumption")
        gpu = Gpu("n1", "GPU-a", nvml)
        counted = metered(gpu, lambda: self.work(nvml))
        assert counted == Counted("GPU-a of n1", reason="NVML reports no energy for this GPU: Not Supported")
        assert gpu.clocks(0).held_back["power limit"] == pytest.approx(0.12)

    def test_a_counter_that_goes_backwards_and_a_stretch_shorter_than_counters_resolve_are_no_figure(self):
        nvml = made_nvml()
        counted = metered(Gpu("n1", "GPU-a", nvml), lambda: self.work(nvml, joules=-1))
        assert counted.reason == "NVML's energy counter went backwards: the driver was reloaded"
        gpu = Gpu("n1", "GPU-a", nvml)
        counted = metered(gpu, lambda: self.work(nvml), seconds=0.9)
        assert counted.reason == "no uninterrupted steps after the warm-up lasted 1 s, the minimum for NVML"
        assert gpu.clocks(0).held_back is None

    def test_a_gpu_that_nvml_does_not_know(self):
        gpu = Gpu("n1", "GPU-b", made_nvml())
        assert metered(gpu) == Counted("GPU-b of n1", reason="NVML cannot find GPU-b: 'GPU-b'")
        assert gpu.clocks(3) == Clocks(3)


class TestEnergy:
    def test_devices_add_up_and_one_that_two_ranks_share_counts_once(self):
        shared = Counted("GPU-a of n1", 10, 5.0, 1000.0)
        total = energy([shared, shared, Counted("GPU-b of n1", 20, 10.0, 1000.0)], 5)
        assert total == Energy("NVML", 10, 5.0, 300.0, joules_per_sample=30.0)

    def test_a_part_of_the_devices_is_no_figure_and_a_reason_that_all_share_is_told_once(self):
        total = energy([Counted("n1", 1, 1.0, 8.0), Counted("n2", reason="permission denied")], 4)
        assert total == Energy(reason="n2: permission denied")
        total = energy([Counted(name, reason="why") for name in ("n1", "n2")], 4)
        assert total == Energy(reason="why")


class TestOnAGpu:
    """The order of what is asked, with a stand-in for the GPU."""

    @pytest.fixture
    def nvml(self, monkeypatch):
        nvml = made_nvml()
        monkeypatch.setattr(node_state, "connect_nvml", lambda _: (nvml, None))
        monkeypatch.setattr(node_state, "gpu_identity", lambda device: "GPU-a")
        monkeypatch.setattr(module, "gather", lambda value: [value])
        monkeypatch.setattr(module.node_state, "gather", lambda value: [value])
        monkeypatch.setattr(node_state, "inspect_gpus", lambda: node_state.Gpus([GPU]))
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: nvml.now))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait(nvml))
        nvml.now, nvml.queued, nvml.is_up = 0.0, 0, True
        return nvml

    @staticmethod
    def wait(nvml):
        """The GPU finishes what is queued: 300 J in 2 s for each step."""
        nvml.now += 2.0 * nvml.queued
        nvml.millijoules += 300_000 * nvml.queued
        nvml.nanoseconds[0] += nvml.queued * 10**9
        nvml.queued = 0

    @staticmethod
    def queue(nvml, loop, steps):
        loop.taken += steps
        nvml.queued = steps

    @staticmethod
    def meter(loop):
        config = SimpleNamespace(train=SimpleNamespace(warmup_steps=3))
        training = SimpleNamespace(layout=SimpleNamespace(global_batch=4), data=SimpleNamespace(tokens_per_sample=5))
        of_rank: Any = SimpleNamespace(
            spec=SimpleNamespace(config=config, virtual=None), world=SimpleNamespace(rank=0),
            device=torch.device("cuda", 0), training=training,
        )  # fmt: skip
        return EnergyMeter(of_rank, loop)

    def test_energy_is_read_when_it_has_finished(self, nvml):
        loop: Any = SimpleNamespace(taken=0)
        meter = self.meter(loop)
        for steps in (2, 2, 6):
            self.queue(nvml, loop, steps)
            with meter.paused():
                self.wait(nvml)  # as a drain does
                nvml.now += 5.0
                nvml.millijoules += 100_000
        self.queue(nvml, loop, 4)
        meter.stop()
        hardware = meter.finish()
        gpu, (clocks,) = hardware.gpu, hardware.clocks
        assert (gpu.steps, gpu.seconds, gpu.watts, gpu.joules_per_sample) == (10, 20.0, 150.0, 300.0 / 4)
        assert (clocks.rank, clocks.held_back["power limit"]) == (0, 0.5)
        assert [load.gpu_ranks for load in hardware.other_load] == [[0]]
        assert not nvml.is_up

    def test_without_counters_nothing_waits_for_the_device(self, nvml, monkeypatch):
        monkeypatch.setattr(node_state, "connect_nvml", lambda _: (None, "the package nvidia-ml-py is not installed"))
        loop: Any = SimpleNamespace(taken=0)
        meter = self.meter(loop)
        for _ in range(3):
            self.queue(nvml, loop, 4)
            with meter.paused():
                assert nvml.queued == 4
        meter.stop()
        assert nvml.queued == 4
        assert meter.finish().gpu.reason == "the package nvidia-ml-py is not installed"
