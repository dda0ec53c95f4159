"""Energy and clocks: RAPL in a made folder and NVML by a stand-in, as there may be neither; which steps are metered."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig

from ptdbench.measure import gpu_state
from ptdbench.records.schema import Clocks, Energy
from ptdbench.training import energy as module
from ptdbench.training.checkpointing import Checkpointing
from ptdbench.training.energy import Counted, EnergyMeter, Gpu, Packages, energy
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.loop import StepLoop
from ptdbench.workloads import train
from tests.conftest import composed
from tests.parallel.ranks import on_ranks
from tests.workloads.made_job import job
from tests.workloads.made_task import TASK

#: As NVML describes it, with another process.
GPU = gpu_state.Gpu(*[None] * 13)
GPU.uuid, GPU.processes = "GPU-a", 2


def zone(root: Path, name: str, title: str, microjoules: int = 0, full: int = 262_143_328_850) -> Path:
    """A zone of RAPL; returns the file of its counter."""
    folder = root / name
    folder.mkdir()
    for file, value in {"name": title, "max_energy_range_uj": full, "energy_uj": microjoules}.items():
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def metered(counter, *advances, seconds=10.0, steps=5):
    """What the counter counted over one stretch during which these functions ran."""
    counter.begin()
    for advance in advances:
        advance()
    counter.end(steps, seconds)
    return counter.counted()


class TestPackages:
    def test_stretches_of_two_packages_add_up_without_their_parts_and_the_platform(self, tmp_path):
        one, other = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000), zone(tmp_path, "intel-rapl:1", "package-1")
        part, platform = zone(tmp_path, "intel-rapl:0:0", "core"), zone(tmp_path, "intel-rapl:2", "psys")
        again = zone(tmp_path, "intel-rapl-mmio:0", "package-0")
        counter = Packages("n1", tmp_path)
        assert counter.reason is None

        def work():
            one.write_text("8500000\n")
            other.write_text("2000000\n")
            for file in (part, platform, again):
                file.write_text("999000000\n")

        assert metered(counter, work) == Counted("n1", 5, 10.0, pytest.approx(9.5))
        one.write_text("50000000\n")  # between two stretches, as of an evaluation
        last = metered(counter, lambda: one.write_text("54000000\n"), seconds=2.0, steps=1)
        assert last == Counted("n1", 6, 12.0, pytest.approx(13.5))

    def test_a_counter_that_starts_again_and_one_that_may_have_twice(self, tmp_path):
        file = zone(tmp_path, "intel-rapl:0", "package-0", 65_532_000_000, full=65_532_610_987)
        counted = metered(Packages("n1", tmp_path), lambda: file.write_text("389013\n"))
        assert (counted.joules, counted.reason) == (pytest.approx(1.0), None)
        reason = metered(Packages("n1", tmp_path), seconds=40.0).reason
        assert reason == "40 s without a reading are too long for RAPL's counters, which wrap after 65533 J"

    def test_a_machine_without_readable_counters(self, tmp_path, monkeypatch):
        root = tmp_path / "powercap"
        for prepare in (lambda: None, root.mkdir, lambda: zone(root, "intel-rapl:1", "psys")):  # the platform alone
            prepare()
            counted = metered(Packages("n1", root))
            assert counted == Counted("n1", reason=f"there are no CPU packages in {root} (RAPL)")
        file = zone(tmp_path, "intel-rapl:0", "package-0")
        refused, opened = mock.Mock(side_effect=PermissionError(13, "Permission denied", str(file))), Path.open
        monkeypatch.setattr(
            Path, "open", lambda self, *how, **s: (refused if self == file else opened)(self, *how, **s)
        )
        reason = metered(Packages("n1", tmp_path)).reason
        assert reason == f"permission denied: cannot read {file}"

    def test_a_counter_that_breaks_stays_broken(self, tmp_path):
        file = zone(tmp_path, "intel-rapl:0", "package-0")
        counter = Packages("n1", tmp_path)
        metered(counter, lambda: file.write_text("1000000\n"))
        with mock.patch.object(os, "pread", side_effect=OSError(61, "No data available")):
            reason = metered(counter).reason
        assert reason == "cannot read RAPL: [Errno 61] No data available"
        assert metered(counter).reason == reason

    def test_a_stretch_shorter_than_counters_resolve_is_left_out(self, tmp_path):
        file = zone(tmp_path, "intel-rapl:0", "package-0")
        counter = Packages("n1", tmp_path)
        counted = metered(counter, lambda: file.write_text("1000000\n"), seconds=0.09)
        assert counted == Counted(
            "n1", reason="no uninterrupted steps after the warm-up lasted 0.1 s, the minimum for RAPL"
        )
        assert metered(counter, lambda: file.write_text("3000000\n"), seconds=0.1).joules == 2.0


def made_nvml(*lacks: str) -> SimpleNamespace:
    """NVML with one GPU, GPU-a, in the state that a test sets; ``lacks`` are the questions that it does not answer."""
    nvml = SimpleNamespace(millijoules=5_000, clock=1980, reasons=0, nanoseconds={0: 10**9, 1: 0}, is_up=False)
    answers = {
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: setattr(nvml, "is_up", True),
        "nvmlShutdown": lambda: setattr(nvml, "is_up", False),
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-a": "handle"}[uuid],
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: nvml.millijoules,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: nvml.clock}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {1: 1980}[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: nvml.reasons,
        "nvmlDeviceGetViolationStatus": lambda handle, policy: SimpleNamespace(violationTime=nvml.nanoseconds[policy]),
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
        assert nvml.is_up
        gpu.close()
        assert not nvml.is_up

    def test_the_clock_while_it_works(self):
        nvml = made_nvml()
        gpu = Gpu("n1", "GPU-a", nvml)
        for nvml.clock, nvml.reasons in ((1755, 0x4), (1200, 0x4 | 0x40), (1980, 0)):
            gpu.look()
        assert gpu.clocks(3) == Clocks(3, 1980, 1200, 1980, ["power cap", "too hot (hardware)"], None)  # no stretch yet

    def test_a_driver_without_causes_and_a_gpu_without_energy(self):
        nvml = made_nvml("nvmlDeviceGetViolationStatus")
        gpu = Gpu("n1", "GPU-a", nvml)
        nvml.reasons = 0x4
        metered(gpu, gpu.look)
        assert (gpu.clocks(0).held_back, gpu.clocks(0).clock_reasons) == (None, ["power cap"])
        nvml = made_nvml("nvmlDeviceGetTotalEnergyConsumption")
        gpu = Gpu("n1", "GPU-a", nvml)
        counted = metered(gpu, gpu.look, lambda: self.work(nvml))
        assert counted == Counted("GPU-a of n1", reason="NVML reports no energy for this GPU: Not Supported")
        assert gpu.clocks(0).sm_clock_mhz == 1980
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
        gpu.look()
        assert metered(gpu) == Counted("GPU-b of n1", reason="NVML cannot find GPU-b: 'GPU-b'")
        assert gpu.clocks(3) == Clocks(3, None, None, None, None, None)


class TestEnergy:
    def test_devices_add_up_and_one_that_two_ranks_share_counts_once(self):
        shared = Counted("GPU-a of n1", 10, 5.0, 1000.0)
        total = energy("NVML", [shared, shared, Counted("GPU-b of n1", 20, 10.0, 1000.0)], 5, 10)
        assert total == Energy("NVML", 10, 5.0, 300.0, 150.0, joules_per_sample=30.0, joules_per_token=3.0)
        assert energy("RAPL", [Counted("n1", 1, 1.0, 8.0)], 4, None).joules_per_token is None

    def test_a_part_of_the_devices_is_no_figure_and_a_reason_that_all_share_is_told_once(self):
        total = energy("RAPL", [Counted("n1", 1, 1.0, 8.0), Counted("n2", reason="permission denied")], 4, None)
        assert total == Energy(reason="n2: permission denied")
        total = energy("RAPL", [Counted(name, reason="why") for name in ("n1", "n2")], 4, None)
        assert total == Energy(reason="why")


def trained(directory: Path, options: DictConfig, root: Path) -> Any:
    """What is metered of a run in which a step takes 2 J, and an evaluation and a checkpoint take many."""
    of_rank = job(directory, options)
    counter = root / "intel-rapl:0" / "energy_uj"

    def taking(owner: type, name: str, joules: int) -> Any:
        done = getattr(owner, name)

        def method(self, *arguments, **named):
            if of_rank.world.rank == 0:
                counter.write_text(str(int(counter.read_text()) + joules * 1_000_000))
            return done(self, *arguments, **named)

        return mock.patch.object(owner, name, method)

    with (
        mock.patch.object(module, "POWERCAP", root), mock.patch.object(Packages, "min_seconds", 0.0),
        taking(StepLoop, "step", 2), taking(Evaluator, "_evaluate", 1000), taking(Checkpointing, "_save", 5000),
    ):  # fmt: skip
        return train.Train()(of_rank).hardware


@pytest.mark.ranks
def test_steps_count_and_what_interrupts_them_does_not(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 7_000_000)
    asked = ("train.steps=11", "train.warmup_steps=4", "eval.every=4", "checkpoint.every_steps=5")
    options = composed(*TASK, "parallel=ddp", "profile.steps=0", *asked)
    hardware, same = on_ranks(2, trained, tmp_path / "run", options, tmp_path)
    assert (hardware.cpu, hardware.gpu, hardware.clocks) == (same.cpu, same.gpu, same.clocks)
    assert (hardware.cpu.source, hardware.cpu.steps, hardware.cpu.reason) == ("RAPL", 11 - 4, None)
    assert hardware.cpu.joules_per_step == pytest.approx(2)  # of one machine, which only its first rank reads
    assert hardware.cpu.watts == pytest.approx(2 * 7 / hardware.cpu.seconds)
    assert (hardware.gpu.reason, hardware.clocks) == ("the run used no GPU", [])


class TestOnAGpu:
    """The order of what is asked, with a stand-in for the GPU."""

    @pytest.fixture
    def nvml(self, monkeypatch, tmp_path):
        nvml = made_nvml()
        monkeypatch.setattr(gpu_state, "connect", lambda _: (nvml, None))
        monkeypatch.setattr(gpu_state, "identity", lambda device: "GPU-a")
        monkeypatch.setattr(module, "POWERCAP", tmp_path)
        monkeypatch.setattr(module, "gather", lambda value: [value])
        monkeypatch.setattr(module.contention, "gather", lambda value: [value])
        monkeypatch.setattr(gpu_state, "inspect", lambda: gpu_state.Gpus([GPU]))
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: nvml.now))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait(nvml))
        nvml.now, nvml.queued, nvml.is_up = 0.0, 0, True
        return nvml

    @staticmethod
    def wait(nvml):
        """The GPU finishes what is queued: 300 J in 2 s for each step, at a low clock."""
        nvml.now += 2.0 * nvml.queued
        nvml.millijoules += 300_000 * nvml.queued
        nvml.nanoseconds[0] += nvml.queued * 10**9
        nvml.queued, nvml.clock = 0, 1980

    @staticmethod
    def queue(nvml, loop, steps):
        loop.taken += steps
        nvml.queued, nvml.clock = steps, 1200

    @staticmethod
    def meter(loop, rank=0):
        config = SimpleNamespace(train=SimpleNamespace(warmup_steps=3))
        training = SimpleNamespace(layout=SimpleNamespace(global_batch=4), data=SimpleNamespace(tokens_per_sample=5))
        of_rank: Any = SimpleNamespace(
            spec=SimpleNamespace(config=config, virtual=None),
            world=SimpleNamespace(rank=rank),
            device=torch.device("cuda", 0),
            training=training,
        )
        return EnergyMeter(of_rank, loop)

    def test_energy_is_read_when_it_has_finished_and_the_clock_before(self, nvml, tmp_path):
        loop: Any = SimpleNamespace(taken=0)
        meter = self.meter(loop)
        for steps in (2, 2, 6):
            self.queue(nvml, loop, steps)
            with meter.paused():
                self.wait(nvml)  # as a drain does
                nvml.now += 5.0
                nvml.millijoules += 100_000
        self.queue(nvml, loop, 4)
        with meter.paused():  # by the save of the last step
            nvml.clock, nvml.reasons = 300, 0x1
        meter.stop()
        hardware = meter.finish()
        gpu, (clocks,) = hardware.gpu, hardware.clocks
        assert (gpu.steps, gpu.seconds, gpu.watts, gpu.joules_per_step) == (10, 20.0, 150.0, 300.0)
        assert gpu.joules_per_token == 300.0 / 4 / 5
        assert (clocks.rank, clocks.sm_clock_mhz, clocks.held_back["power limit"]) == (0, 1200, 0.5)
        assert (clocks.sm_clock_least_mhz, clocks.clock_reasons) == (1200, [])  # not those of an idle GPU
        assert hardware.cpu.reason == f"there are no CPU packages in {tmp_path} (RAPL)"
        assert [load.gpu_ranks for load in hardware.other_load] == [[0]]
        assert not nvml.is_up

    @pytest.mark.parametrize(("machines", "counted"), [("ab", [True, True]), ("aa", [True, False])])
    def test_cpus_of_each_machine_count_once_whatever_it_is_called(self, nvml, monkeypatch, machines, counted):
        """Several machines may be named localhost, and each container of one may have a name of its own."""
        monkeypatch.setattr(module, "gather", lambda value: [*machines])
        made = [self.meter(SimpleNamespace(taken=0), rank)._cpu for rank in range(2)]
        assert [bool(one) for one in made] == counted
        assert len({one.device for one in made if one}) == sum(counted)

    def test_without_counters_nothing_waits_for_the_device(self, nvml, monkeypatch):
        monkeypatch.setattr(gpu_state, "connect", lambda _: (None, "the package nvidia-ml-py is not installed"))
        loop: Any = SimpleNamespace(taken=0)
        meter = self.meter(loop)
        for _ in range(3):
            self.queue(nvml, loop, 4)
            with meter.paused():
                assert nvml.queued == 4
        meter.stop()
        assert nvml.queued == 4
        assert meter.finish().gpu.reason == "the package nvidia-ml-py is not installed"
