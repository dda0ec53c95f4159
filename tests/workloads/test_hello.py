"""The workload ``hello``: what its record says, and that a wrong sum is no success."""

import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch.world import World
from ptdbench.workloads.hello import Hello


@pytest.mark.ranks
def test_every_rank_is_in_the_record_whatever_the_model(run):
    ranks = 3
    words = ("model=gpt_1t", "train.global_batch=7", f"cluster.ranks_per_node={ranks}", "device=cpu")
    record = run("workload=hello", *words)
    assert (record["status"], record["error"], record["world_size"]) == ("ok", None, ranks)
    assert [record[name] for name in ("model", "parallel", "global_batch", "precision", "parameters")] == [None] * 5
    assert (record["losses"], record["metrics"]) == ([], None)
    hello = record["hello"]
    assert (hello["launcher"], hello["backend"], hello["address"]) == ("local", "gloo", "127.0.0.1")
    assert 0 < hello["port"] < 2**16
    assert [(rank["rank"], rank["local_rank"], rank["local_size"]) for rank in hello["ranks"]] == [
        (rank, rank, ranks) for rank in range(ranks)
    ]
    assert {rank["host"] for rank in hello["ranks"]} == {socket.gethostname()}


def test_a_wrong_sum_is_told(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.add_(1))  # rank 1 says 1, and should say 2
    job = SimpleNamespace(world=World(0, 2, 0, 2, "srun"), device=torch.device("cpu"))
    with pytest.raises(ArithmeticError, match=r"^the all-reduce of 1 to 2 gives 2, not 3$"):
        Hello()(job)
