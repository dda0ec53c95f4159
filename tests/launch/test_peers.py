"""What ranks learn about each other when they meet, and which cores they get."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch import peers, settings
from ptdbench.launch.peers import Peer
from ptdbench.launch.world import discover
from tests.parallel.ranks import on_ranks

NODES = ["n1", "n2", "n1"]


def meet() -> list[list[Peer]]:
    """In a rank: whom this rank meets on machines of one name, and on its own node for a share and for one core."""
    own = NODES[dist.get_rank()]
    world = discover(os.environ)
    found = []
    for name, kernel, wanted in (("localhost", own, "auto"), (own, "the same", "auto"), (own, "the same", 1)):
        os.environ["SLURMD_NODENAME"] = name
        peers.machine = lambda kernel=kernel: kernel
        peers.bind_to_share(world, wanted)
        found.append(peers.gather_peers(world, torch.device("cpu")))
    return found


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
