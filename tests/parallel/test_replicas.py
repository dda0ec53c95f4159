"""Checksums of what ranks hold, and what is said where copies differ."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptdbench.parallel import replicas
from ptdbench.parallel.dims import Dims
from tests.parallel.ranks import each, mesh_of, on_ranks


def checksum(tensor: Tensor) -> int:
    ((_, value),) = replicas.checksums([("", tensor)])
    return value


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "int8", "bool", "complex64", "complex128", "uint32"]
)
def test_checksums_see_every_bit(dtype, monkeypatch):
    monkeypatch.setattr(replicas, "_AT_ONCE", 4)  # ten elements are three pieces
    tensor = torch.ones(10, dtype=getattr(torch, dtype))
    seen = {checksum(tensor)}
    for place in range(10):
        changed = tensor.clone()
        changed[place:].view(torch.uint8)[0] ^= 1
        seen.add(checksum(changed))
    assert len(seen) == 11


@pytest.mark.parametrize("change", [
    lambda x: x[[1, 0, *range(2, 10)]],
    lambda x: x[[*range(4, 8), *range(4), 8, 9]],  # pieces
    lambda x: x.view(torch.int32) + torch.tensor([1, -2, 1] + [0] * 7, dtype=torch.int32),
    lambda x: -x,
])  # fmt: skip
def test_checksums_see_cancelling_changes(change, monkeypatch):
    monkeypatch.setattr(replicas, "_AT_ONCE", 4)
    tensor = torch.arange(10.0)
    assert checksum(change(tensor)) != checksum(tensor)


def test_checksums_ignore_memory_order():
    tensor = torch.tensor([[torch.nan, -0.0], [torch.inf, 1.0]])
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(torch.ones(1).expand(3)) == checksum(torch.ones(3))
    assert replicas.checksums([]) == []


def spread(odd: int | None, how: str) -> str:
    """What four ranks say of a weight, one of which has another value; as copies, two shards or four."""
    mesh = mesh_of(Dims(replicate=2, shard=2)).fsdp
    value = torch.full((4,), float(dist.get_rank() if odd is None else dist.get_rank() == odd))
    placements = {
        "copied": [Replicate(), Shard(0)], "divided": [Shard(0), Shard(0)], "whole": [Replicate(), Replicate()],
    }  # fmt: skip
    last = value if how in ("plain", "apart") else DTensor.from_local(value, mesh, placements[how], run_check=False)
    weights = [("first", torch.ones(3)), ("last", last)]
    try:
        weights.append((f"of {dist.get_rank()}", value))  # which others lack, as a stage's
        replicas.require_equal(weights, apart=how == "apart" and dist.get_rank() % 2)
    except RuntimeError as error:
        return str(error).partition(";")[0]
    return "equal"


@pytest.mark.ranks
def test_copies_are_compared_and_shards_are_not():
    differ = "replicas differ: last has other bits on {} than on rank {}".format
    cases = {
        (3, "plain"): differ("rank 3", 0), (None, "plain"): differ("ranks 1, 2, 3", 0),
        (0, "whole"): differ("rank 0", 1),
        (3, "apart"): differ("rank 3", 1), (3, "copied"): differ("rank 3", 1), (None, "copied"): differ("rank 2", 0),
        (3, "divided"): "equal", (None, "divided"): "equal",
    }  # fmt: skip
    assert on_ranks(4, each, spread, cases) == [cases] * 4
