"""What ranks learn about each other when they meet, and which cores they get."""

from __future__ import annotations

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
    """In a rank: whom this rank meets, where each gets its share of the cores and where each asks for one."""
    os.environ["SLURMD_NODENAME"] = NODES[dist.get_rank()]
    world = discover(os.environ)
    assert world is not None
    return [peers.meet(world, torch.device("cpu"), wanted) for wanted in ("auto", 1)]


@pytest.mark.ranks
def test_every_rank_learns_the_same_of_every_rank_and_shares_the_cores_of_its_node(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    seen = on_ranks(3, meet)
    assert seen == [seen[0]] * 3
    shared, bound = seen[0]
    everywhere = sorted(settings.own_cores())
    here = len(everywhere)
    assert [(peer.rank, peer.node) for peer in shared] == list(enumerate(NODES))
    assert [peer.threads for peer in shared] == [max(1, here // 2), here, max(1, here // 2)]
    for peer in shared:
        assert (peer.host, peer.device, peer.cores) == (socket.gethostname(), "cpu", everywhere)
        assert peer.settings["GLOO_SOCKET_IFNAME"] == "lo"
        assert peer.settings["OMP_NUM_THREADS"] == str(peer.threads)
    assert [peer.threads for peer in bound] == [1, 1, 1]
    if here > 1:  # they are bound before they say which cores they have
        first, second, *_ = everywhere
        assert [peer.cores for peer in bound] == [[first], [first], [second]]
