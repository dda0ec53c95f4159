"""Ranks agree on their devices, or all of them say which rank does not fit in."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch import devices, rendezvous
from ptdbench.launch.devices import VisibleGpus
from ptdbench.launch.world import World
from ptdbench.problems import ConfigError
from tests.refusals import Abridged, refusal_of

WORLD = World(rank=0, size=4, local_rank=0, local_size=2, launcher="srun")


def refused(monkeypatch, seen: list[VisibleGpus], device: str = "auto") -> str:
    monkeypatch.setattr(devices, "_survey", lambda world: seen)
    try:
        devices.check(replace(WORLD, size=len(seen)), device)
    except ConfigError as error:
        return str(error)
    return ""


def on(node: str, *ranks: int, gpus: int, reason: str = "") -> list[VisibleGpus]:
    return [VisibleGpus(rank, node, gpus, reason) for rank in ranks]


HALF = on("n1", 0, 1, gpus=2) + on("n2", 2, gpus=0, reason="CUDA driver error: unknown")


@pytest.mark.parametrize(
    ("seen", "options", "message"),
    [
        (on("n1", 0, 1, gpus=2) + on("n2", 2, 3, gpus=4), {}, ""),
        (on("n1", 0, 1, gpus=0) + on("n2", 2, 3, gpus=0), {}, ""),
        (HALF, {"device": "cpu"}, ""),
        (HALF, {}, "device=auto: rank 2 on n2 finds no GPU (CUDA driver error: unknown), and ranks 0, 1 on n1 find 2 "
                   "GPUs: …; see why n2 has …"),
        (HALF, {"device": "cuda"}, "device=cuda: rank 2 on n2 finds no GPU …"),
        (on("n1", 0, 1, gpus=0) + on("n2", 2, gpus=1), {},
         "device=auto: rank 2 on n2 finds 1 GPU, and ranks 0, 1 on n1 find no…"),
    ],
)  # fmt: skip
def test_ranks_without_a_gpu_of_their_own_are_named(monkeypatch, seen, options, message):
    assert refused(monkeypatch, seen, **options) == Abridged(message)


class TestLook:
    def test_look_counts_gpus_or_says_why_there_are_none(self, monkeypatch):
        seen = devices._look(WORLD)
        assert seen.gpus == 0
        assert seen.reason
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert devices._look(WORLD) == VisibleGpus(0, devices.node(os.environ), 1)


@pytest.fixture
def together(monkeypatch):
    """What each rank of a launch is refused with, by rank, where these say so many GPUs and others say nothing."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "store", lambda: store)
    monkeypatch.setattr(rendezvous, "launch_name", lambda world: "launch")
    monkeypatch.setattr(rendezvous, "ARRIVAL", timedelta(seconds=1))

    def check(size: int, gpus: dict[int, int]) -> dict[int, str]:
        monkeypatch.setattr(devices, "_look", lambda world: VisibleGpus(world.rank, f"n{world.rank}", gpus[world.rank]))

        def refusal(rank: int) -> str:
            return refusal_of(devices.check, World(rank, size, 0, 1, "torchrun"), "auto")

        with ThreadPoolExecutor(size) as threads:
            return dict(zip(gpus, threads.map(refusal, gpus), strict=True))

    yield check
    devices._survey.cache_clear()


def test_all_ranks_raise_the_same_refusal(together):
    (message,) = set((said := together(3, {0: 2, 1: 0, 2: 2})).values())
    assert len(said) == 3
    assert message.startswith("device=auto: rank 1 on n1 finds no GPU, and ranks 0, 2 on n0, n2 find 2 GPUs: ")


def test_silent_rank_is_named(together):
    assert together(2, {0: 2}) == {
        0: "torchrun=2 ranks: rank 1 sent no list of devices within 1 s; see their own output"
    }
