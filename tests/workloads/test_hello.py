"""The workload ``hello``: what its record says, and that a wrong sum is no success."""

import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch.world import World
from ptdbench.workloads.hello import Hello
from tests.daily import cases


@pytest.mark.ranks
@cases("ranks", [1, 3], daily=[3])
def test_every_rank_is_in_the_record(run, ranks):
    record = run("workload=hello", f"cluster.ranks_per_node={ranks}", "device=cpu")
    assert (record["status"], record["error"], record["world_size"]) == ("ok", None, ranks)
    hello = record["hello"]
    assert (hello["launcher"], hello["backend"], hello["address"]) == ("local", "gloo", "127.0.0.1")
    assert 0 < hello["port"] < 2**16
    assert [(rank["rank"], rank["local_rank"], rank["local_size"]) for rank in hello["ranks"]] == [
        (rank, rank, ranks) for rank in range(ranks)
    ]
    assert {rank["host"] for rank in hello["ranks"]} == {socket.gethostname()}


@pytest.mark.ranks
def test_it_has_nothing_to_do_with_a_model(run):
    record = run("workload=hello", "device=cpu", "model=gpt_1t", "train.global_batch=7")
    assert record["status"] == "ok"
    assert [record[name] for name in ("model", "parallel", "global_batch", "precision", "parameters")] == [None] * 5
    assert (record["losses"], record["metrics"]) == ([], None)


def test_a_wrong_sum_is_told(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.add_(1))  # rank 1 says 1, and should say 2
    job = SimpleNamespace(world=World(0, 2, 0, 2, "srun"), device=torch.device("cpu"))
    with pytest.raises(ArithmeticError, match=r"^the sum of 1 to 2 over the ranks is 3, not 2$"):
        Hello()(job)
