"""Which steps are metered: with counters that are made up, as a machine may have none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from omegaconf import DictConfig

from ptdbench.measure import gpu_state
from ptdbench.records import schema
from ptdbench.training import energy
from ptdbench.training.checkpointing import Checkpointing
from ptdbench.training.energy import EnergyMeter, Packages
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.loop import StepLoop
from ptdbench.workloads import train
from tests.conftest import composed
from tests.parallel.ranks import on_ranks
from tests.training.test_energy import made_nvml, zone
from tests.training.test_evaluation import TASK
from tests.workloads.made_job import job


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
        mock.patch.object(energy, "POWERCAP", root), mock.patch.object(Packages, "least_seconds", 0.0),
        taking(StepLoop, "step", 2), taking(Evaluator, "_evaluate", 1000), taking(Checkpointing, "_save", 5000),
    ):  # fmt: skip
        return train.Train()(of_rank).fields["hardware"]


@pytest.mark.ranks
def test_steps_count_and_what_interrupts_them_does_not(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 7_000_000)
    asked = ("train.steps=11", "train.warmup_steps=4", "eval.every=4", "checkpoint.every_steps=5")
    options = composed(*TASK, "parallel=ddp", "profile.steps=0", *asked)
    found, same = on_ranks(2, trained, tmp_path / "run", options, tmp_path)
    assert found == same
    cpu = found["cpu"]
    assert (cpu["source"], cpu["steps"], cpu["reason"]) == ("RAPL", 11 - 4, None)
    assert cpu["joules_per_step"] == pytest.approx(2)  # of one machine, which only its first rank reads
    assert cpu["watts"] == pytest.approx(2 * 7 / cpu["seconds"])
    assert (found["gpu"]["reason"], found["clocks"]) == ("the run used no GPU", [])
    msgspec.convert(found, schema.Hardware)


class TestOnAGpu:
    """The order of what is asked, with a stand-in for the GPU."""

    @pytest.fixture
    def nvml(self, monkeypatch, tmp_path):
        nvml = made_nvml()
        monkeypatch.setattr(gpu_state, "connect", lambda _: (nvml, None))
        monkeypatch.setattr(gpu_state, "identity", lambda device: "GPU-a")
        monkeypatch.setattr(energy, "POWERCAP", tmp_path)
        monkeypatch.setattr(energy, "gather", lambda value: [value])
        monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: nvml.now))
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
    def meter(loop, local_rank=0):
        config = SimpleNamespace(train=SimpleNamespace(warmup_steps=3))
        training = SimpleNamespace(layout=SimpleNamespace(global_batch=4), data=SimpleNamespace(tokens_per_sample=5))
        of_rank: Any = SimpleNamespace(
            spec=SimpleNamespace(config=config, virtual=None),
            world=SimpleNamespace(local_rank=local_rank),
            device=torch.device("cuda", 0),
            training=training,
        )
        return EnergyMeter(of_rank, loop)

    def test_energy_is_read_when_it_has_finished_and_the_clock_before(self, nvml, tmp_path):
        loop: Any = SimpleNamespace(taken=0)
        meter = self.meter(loop)
        for steps in (2, 2, 6):
            self.queue(nvml, loop, steps)
            with meter.interrupted():
                self.wait(nvml)  # as a drain does
                nvml.now += 5.0
                nvml.millijoules += 100_000
        self.queue(nvml, loop, 4)
        meter.stop()
        found = meter.finish()
        gpu, (clocks,) = found["gpu"], found["clocks"]
        assert (gpu["steps"], gpu["seconds"], gpu["watts"], gpu["joules_per_step"]) == (10, 20.0, 150.0, 300.0)
        assert gpu["joules_per_token"] == 300.0 / 4 / 5
        assert (clocks["rank"], clocks["sm_clock_mhz"], clocks["held_back"]["power limit"]) == (0, 1200, 0.5)
        assert found["cpu"]["reason"] == f"this machine shows no CPU packages in {tmp_path} (RAPL)"
        msgspec.convert(found, schema.Hardware)
        assert not nvml.is_up

    def test_without_counters_nothing_waits_for_the_device(self, nvml, monkeypatch):
        monkeypatch.setattr(gpu_state, "connect", lambda _: (None, "the package nvidia-ml-py is not installed"))
        loop: Any = SimpleNamespace(taken=0)
        meter = self.meter(loop)
        for _ in range(3):
            self.queue(nvml, loop, 4)
            with meter.interrupted():
                assert nvml.queued == 4
        meter.stop()
        assert nvml.queued == 4
        assert meter.finish()["gpu"]["reason"] == "the package nvidia-ml-py is not installed"
