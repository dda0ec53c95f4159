"""The mesh of eight ranks: which of them share what, also by degrees that are not there yet."""

import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ptdbench.parallel.dims import Dims
from ptdbench.parallel.mesh import Mesh
from tests.parallel.ranks import pretended
from tests.parallel.test_dims import WithTwoMore


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    of_each_rank = []
    for rank in range(8):
        with pretended(8, rank):
            of_each_rank.append(in_rank())
    return of_each_rank


def in_rank() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what torch will not do later
        copied = Mesh(Dims(replicate=2, shard=2, context=2), "cpu")
    plain = Mesh(Dims(replicate=2, pipeline=2, tensor=2), "cpu")
    more = Mesh(WithTwoMore(branch=2, shard=2, tensor=2, expert=2), "cpu")
    alone = Mesh(WithTwoMore(shard=8, expert=1), "cpu")
    return {
        "copied": ranks(copied.fsdp),
        "plain": {row.dimension: ranks(plain[row.dimension]) for row in Dims.rows().values()},
        "groups": list(plain.groups()),
        "more": {row.dimension: ranks(more[row.dimension]) for row in WithTwoMore.rows().values()},
        "batch": ranks(more.dp),
        "shard": ranks(more.fsdp),
        "folds": ranks(more.regrouped["ep"]),
        "alone": (ranks(alone["ep"]), alone.regrouped),
    }


def ranks(mesh: DeviceMesh | None) -> Any:
    return mesh.mesh.tolist() if mesh is not None else None


def test_ranks_share_what_their_places_say_under_equal_names(of_ranks):
    assert of_ranks[3]["plain"] == {
        "dp_replicate": [3, 7], "pp": [1, 3], "dp_shard": [3], "tp": [2, 3], "cp": None, "ep": None
    }  # fmt: skip
    assert of_ranks[3]["copied"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    names = {tuple(of_rank["groups"]) for of_rank in of_ranks}
    assert names == {("dp_cp", "fsdp", "dp_replicate", "pp", "tp")}


def test_added_and_regrouping_degrees_are_dimensions(of_ranks):
    of_three = of_ranks[3]
    assert of_three["more"]["branch"] == [3, 7]
    assert of_three["batch"] == [1, 3, 5, 7]  # branches and shards have different samples
    assert of_three["shard"] == [[1, 3], [5, 7]]  # of each branch
    # Shards are two apart, products one; experts are shared by neighbors, and copied over the others.
    for rank, of_rank in enumerate(of_ranks):
        first = rank // 4 * 4
        assert of_rank["folds"] == [[first, first + 1], [first + 2, first + 3]]
        assert of_rank["more"]["ep"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert of_rank["alone"] == (None, {})


@pytest.mark.parametrize("degrees", [
    {}, {"replicate": 8}, {"pipeline": 4}, {"replicate": 2, "shard": 4}, {"replicate": 2, "tensor": 2},
    {"replicate": 2, "shard": 2, "pipeline": 2}, {"shard": 2, "context": 2, "tensor": 2},
    {"replicate": 2, "context": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"context": 2, "pipeline": 2},
    {"replicate": 2, "shard": 2, "tensor": 2, "expert": 2},
    {"replicate": 2, "shard": 2, "context": 2, "tensor": 2, "pipeline": 2},
])  # fmt: skip
def test_communicators_are_counted(degrees):
    dims = Dims(**degrees)
    with pretended(dims.world_size):
        Mesh(dims, "cpu")
        groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_world_size(group) > 1]
    assert dims.communicators == len(groups) + 2 * (dims.pipeline > 1)


def test_groups_differ_except_for_context():
    """A dimension of one rank, as FSDP needs for replicas of DTensors, adds none to others."""
    with pretended(8):
        mesh = Mesh(Dims(replicate=2, context=2, tensor=2), "cpu")
        groups = [tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map]
        shards, positions = mesh.fsdp.get_group(mesh.fsdp.ndim - 1), mesh["cp"].get_group()
    assert len({*groups}) == len(groups) - 1
    assert shards is not positions
