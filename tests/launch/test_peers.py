"""What ranks tell each other: devices, or which rank does not fit in; and where they are, and which cores they get."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch import peers, rendezvous, settings
from ptdbench.launch.peers import VisibleGpus
from ptdbench.launch.world import Peer, World, discover
from ptdbench.problems import ConfigError
from tests.parallel.ranks import on_ranks
from tests.refusals import Abridged, refusal_of

WORLD = World(rank=0, size=4, local_rank=0, local_size=2, launcher="srun")


def refused(monkeypatch, seen: list[VisibleGpus], device: str = "auto", backend: str = "auto") -> str:
    monkeypatch.setattr(peers, "_survey", lambda world: seen)
    try:
        peers.require_devices(replace(WORLD, size=len(seen)), device, backend)
    except ConfigError as error:
        return str(error)
    return ""


def on(node: str, *ranks: int, gpus: int, reason: str = "") -> list[VisibleGpus]:
    return [VisibleGpus(rank, node, len(ranks), gpus, reason=reason) for rank in ranks]


HALF = on("n1", 0, 1, gpus=2) + on("n2", 2, gpus=0, reason="CUDA driver error: unknown")
SAME = [VisibleGpus(0, "n1", 2, 1, "a"), VisibleGpus(1, "n1", 2, 1, "a")]


@pytest.mark.parametrize(("seen", "options", "message"), [
    (on("n1", 0, 1, gpus=2) + on("n2", 2, 3, gpus=4), {}, ""),
    (on("n1", 0, 1, gpus=0) + on("n2", 2, 3, gpus=0), {}, ""),
    (HALF, {"device": "cpu"}, ""),
    (HALF, {}, "device=auto: rank 2 on n2 finds no GPU (CUDA driver error: unknown), and ranks 0, 1 on n1 find 2 "
               "GPUs: …; see why n2 has …"),
    (HALF, {"device": "cuda"}, "device=cuda: rank 2 on n2 finds no GPU …"),
    (on("n1", 0, 1, gpus=0) + on("n2", 2, gpus=1), {},
     "device=auto: rank 2 on n2 finds 1 GPU, and ranks 0, 1 on n1 find no…"),
    (on("n1", 0, gpus=1) + on("n2", 1, 2, 3, gpus=2), {},
     "device=auto: srun started 3 ranks on n2, and each sees 2 GPUs there: …; start at most 2 ranks a node, or …"),
    ([SAME[0], VisibleGpus(1, "n1", 2, 1, "b")], {}, ""),  # each rank is given a GPU of its own
    (SAME, {"backend": "gloo"}, ""),
    (SAME, {}, "device=auto: ranks 0, 1 on n1 see only one GPU, and it is the same one: …; start one rank a GPU…"),
])  # fmt: skip
def test_ranks_without_a_gpu_of_their_own_are_named(monkeypatch, seen, options, message):
    assert refused(monkeypatch, seen, **options) == Abridged(message)


class TestLook:
    def test_look_counts_usable_gpus_with_uuid_or_reason(self, monkeypatch):
        seen = peers._look(WORLD)
        assert seen.gpus == 0
        assert seen.reason
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        broken = RuntimeError("CUDA error: unknown error. This could be a driver.\nmore")
        monkeypatch.setattr(torch.cuda, "get_device_properties", Mock(side_effect=broken))
        seen = peers._look(WORLD)
        assert (seen.gpus, seen.reason) == (0, "CUDA error: unknown error")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-7"))
        assert peers._look(WORLD).uuid == "GPU-7"
        assert peers._look(replace(WORLD, local_size=1)).uuid == ""


@pytest.fixture
def together(monkeypatch):
    """What each rank of a launch is refused with, by rank, where these say so many GPUs and others say nothing."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "store", lambda: store)
    monkeypatch.setattr(rendezvous, "launch_name", lambda world: "launch")
    monkeypatch.setattr(rendezvous, "ARRIVAL", timedelta(seconds=1))

    def check(size: int, gpus: dict[int, int]) -> dict[int, str]:
        monkeypatch.setattr(
            peers, "_look", lambda world: VisibleGpus(world.rank, f"n{world.rank}", 1, gpus[world.rank])
        )

        def refusal(rank: int) -> str:
            return refusal_of(peers.require_devices, World(rank, size, 0, 1, "torchrun"), "auto", "auto")

        with ThreadPoolExecutor(size) as threads:
            return dict(zip(gpus, threads.map(refusal, gpus), strict=True))

    yield check
    peers._survey.cache_clear()


def test_all_ranks_raise_the_same_refusal(together):
    (message,) = set((refusals := together(3, {0: 2, 1: 0, 2: 2})).values())
    assert len(refusals) == 3
    assert message.startswith("device=auto: rank 1 on n1 finds no GPU, and ranks 0, 2 on n0, n2 find 2 GPUs: ")


def test_silent_rank_is_named(together):
    assert together(2, {0: 2}) == {
        0: "torchrun=2 ranks: rank 1 sent no list of devices within 1 s; see their own output"
    }


NODES = ["n1", "n2", "n1"]


def meet() -> list[list[Peer]]:
    """In a rank: whom this rank meets on machines of one name, and on its own node for a share and for one core."""
    node = NODES[dist.get_rank()]
    world = discover(os.environ)
    meetings = []
    for name, kernel, wanted in (("localhost", node, "auto"), (node, "the same", "auto"), (node, "the same", 1)):
        os.environ["SLURMD_NODENAME"] = name
        peers.machine = lambda kernel=kernel: kernel
        peers.bind_to_share(world, wanted)
        meetings.append(peers.gather_peers(world, torch.device("cpu")))
    return meetings


@pytest.mark.ranks
def test_ranks_share_cores_and_describe_themselves_to_all(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    seen = on_ranks(3, meet)
    assert seen == [seen[0]] * 3
    alike, shared, bound = seen[0]
    everywhere = sorted(settings.own_cores())
    here = len(everywhere)
    assert [(peer.rank, peer.node) for peer in shared] == list(enumerate(NODES))
    for meeting in (alike, shared):
        assert [peer.threads for peer in meeting] == [max(1, here // 2), here, max(1, here // 2)]
    for peer in shared:
        assert (peer.host, peer.device, peer.cores) == (socket.gethostname(), "cpu", everywhere)
        assert peer.settings["GLOO_SOCKET_IFNAME"] == "lo"
        assert peer.settings["OMP_NUM_THREADS"] == str(peer.threads)
    assert [peer.threads for peer in bound] == [1, 1, 1]
    if here > 1:  # they are bound before they say which cores they have
        first, second, *_ = everywhere
        assert [peer.cores for peer in bound] == [[first], [first], [second]]
