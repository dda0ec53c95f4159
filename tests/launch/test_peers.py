"""What ranks learn about each other when they meet, and which settings count."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from msgspec import to_builtins

from ptdbench.launch import local, peers, rendezvous, settings
from ptdbench.launch.world import discover


def meet(environ: dict[str, str], nodes: list[str], wanted: int | str, folder: Path) -> None:
    """In a rank: meet the others from the node that is named, and write down whom this rank met."""
    os.environ["SLURMD_NODENAME"] = nodes[int(os.environ["RANK"])]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world, device = discover(os.environ), torch.device("cpu")
    assert world is not None
    os.environ |= {name: value for name, value in environ.items() if name not in os.environ}
    with rendezvous.process_group(world, "gloo", device, key=str(folder)):
        met = peers.meet(world, device, wanted)
    (folder / f"{world.rank}.json").write_text(json.dumps(to_builtins(met)))


def met(nodes, wanted, folder):
    """Whom each rank met."""
    local.start(meet, len(nodes), nodes, wanted, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(nodes))]


@pytest.mark.ranks
class TestMeeting:
    def test_every_rank_learns_the_same_of_every_rank_and_shares_the_cores_of_its_node(self, tmp_path):
        here = len(settings.own_cores())
        seen = met(["n1", "n2", "n1"], "auto", tmp_path)
        assert seen[0] == seen[1] == seen[2]
        assert [(peer["rank"], peer["node"]) for peer in seen[0]] == [(0, "n1"), (1, "n2"), (2, "n1")]
        assert [peer["threads"] for peer in seen[0]] == [max(1, here // 2), here, max(1, here // 2)]
        for peer in seen[0]:
            assert (peer["host"], peer["device"], peer["cores"]) == (
                socket.gethostname(),
                "cpu",
                sorted(settings.own_cores()),
            )
            assert peer["settings"]["GLOO_SOCKET_IFNAME"] == "lo"
            assert peer["settings"]["OMP_NUM_THREADS"] == str(peer["threads"])

    @pytest.mark.skipif(len(settings.own_cores()) < 2, reason="takes two cores")
    def test_ranks_are_bound_before_they_say_which_cores_they_have(self, tmp_path):
        first, second, *_ = sorted(settings.own_cores())
        (seen, *_) = met(["n1", "n2", "n1"], 1, tmp_path)
        assert [peer["cores"] for peer in seen] == [[first], [first], [second]]
        assert [peer["threads"] for peer in seen] == [1, 1, 1]
