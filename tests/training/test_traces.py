from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch.peers import Peer
from ptdbench.training import traces
from tests.parallel.ranks import each, on_ranks

CPU = torch.device("cpu")


def peer(rank: int, host: str) -> Peer:
    return Peer(rank, 0, 1, host, host, "cpu", [0], 1, {})


def aheads(hosts: str, skew: float) -> float:
    """In a rank: by how much its clock is ahead, where all but that of the first machine are ``skew`` ahead."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        if hosts[rank] != hosts[0]:
            now = traces.time.time
            patched.setattr(traces, "time", SimpleNamespace(time=lambda: now() + skew))
        return traces.clock_ahead([peer(number, host) for number, host in enumerate(hosts)], rank, CPU)


@pytest.mark.ranks
def test_one_rank_of_each_other_machine_asks_rank_0_for_the_time():
    found = on_ranks(3, each, aheads, [("abb", 5.0), ("aab", 5.0)])
    assert [[of_rank[hosts, 5.0] for of_rank in found] for hosts in ("abb", "aab")] == [
        [0, pytest.approx(5.0, abs=0.5), found[1]["abb", 5.0]], [0, 0, pytest.approx(5.0, abs=0.5)],
    ]  # fmt: skip
    assert found[1]["abb", 5.0] == found[2]["abb", 5.0]
