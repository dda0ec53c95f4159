"""Degrees of parallelism: which are derived, and which do not fit."""

import math
from dataclasses import dataclass
from itertools import product

import pytest

from ptdbench.parallel.dims import Dims, degree, derive
from ptdbench.problems import ConfigError
from tests.parallel.made import refused
from tests.refusals import Abridged

NAMES = ("replicate", "shard", "context", "tensor", "pipeline")


def wanted(**degrees):
    return dict.fromkeys(NAMES, 1) | degrees


@pytest.mark.parametrize(("world_size", "degrees", "derived"), [
    (1, {"replicate": "auto"}, Dims()),
    (8, {"replicate": "auto", "shard": "auto"}, Dims(replicate=4, shard=2)),
    (2, {"replicate": "auto", "pipeline": "auto"}, Dims(pipeline=2)),
    (6, {"replicate": "auto", "pipeline": "auto"}, Dims(replicate=3, pipeline=2)),
    (9, {"replicate": "auto", "pipeline": "auto"}, Dims(replicate=3, pipeline=3)),
    (8, {"replicate": 2, "pipeline": "auto"}, Dims(replicate=2, pipeline=4)),
    (8, {"replicate": "auto", "tensor": "auto"}, Dims(replicate=4, tensor=2)),
    (8, {"shard": "auto", "tensor": "auto", "pipeline": "auto"}, Dims(shard=2, tensor=2, pipeline=2)),
])  # fmt: skip
def test_degrees_that_are_not_given_are_derived(world_size, degrees, derived):
    assert derive(world_size, wanted(**degrees)) == derived


def test_degrees_exist_iff_they_multiply_to_ranks():
    accepted = refusals = 0
    degrees = (1, 2, 3, "auto")
    for world_size, *values in product(range(1, 13), degrees, degrees, degrees):
        requested = dict(zip(("replicate", "shard", "pipeline"), values, strict=True))
        fixed = math.prod(value for value in values if value != "auto")
        possible = world_size % fixed == 0 if "auto" in values else world_size == fixed
        try:
            dims = derive(world_size, wanted(**requested))
        except ConfigError:
            refusals += 1
            assert not possible, (world_size, requested)
            continue
        accepted += 1
        assert possible, (world_size, requested)
        assert dims.world_size == world_size
        assert all(value in ("auto", getattr(dims, name)) for name, value in requested.items())
    assert accepted > 100
    assert refusals > 100


@pytest.mark.parametrize(("world_size", "degrees", "message"), [
    (4, {"replicate": "auto", "pipeline": 3},
     "pipeline=3: replicate(auto) x pipeline(3) must equal the number of ranks, 4; try 2, 4"),
    (8, {"replicate": 2, "shard": 3}, "shard=3: replicate(2) x shard(3) = 6 must equal …, 8; try 4"),
    (8, {"replicate": 3, "shard": 4}, "replicate=3: replicate(3) x shard(4) = 12 must equal …, 8; try 2"),
    (8, {"replicate": 3, "shard": 3}, "shard=3: … = 9 must equal …, 8; try 9 ranks, or auto for …"),
    (2, {}, "replicate=1: … are 1, but there are 2 ranks; try 2, auto, or cluster.ranks_per_node=1"),
    (3, {"replicate": 2, "shard": "auto"}, "replicate=2: replicate(2) x shard(auto) must equal …, 3; try 3"),
])  # fmt: skip
def test_refusal_states_the_equation(world_size, degrees, message):
    assert refused(derive, world_size, wanted(**degrees)) == Abridged(message)


@dataclass(frozen=True)
class WithTwoMore(Dims):
    """A degree that is a factor of the ranks, and one that divides those of three others in its own way."""

    branch: int = degree("Copies in other branches.", "b", "branch", divides=("samples",), place=-1)
    expert: int = degree("Ranks that share experts.", "e", "ep", regroups=("shard", "context", "tensor"))


def with_two_more(world_size, **degrees):
    return derive(world_size, {**wanted(), "branch": 1, "expert": 1, **degrees}, WithTwoMore)


def test_added_degree_divides_its_share():
    dims = with_two_more(8, branch=2, replicate="auto", tensor=2)
    assert (dims.replicate, dims.world_size, dims.batch, dims.shards) == (2, 8, 4, 1)
    assert dims.order() == ("branch", "replicate", "pipeline", "shard", "context", "tensor")
    assert dims.order("samples") == ("branch", "replicate", "shard")
    assert dims.copied() == ("branch", "replicate")
    assert dims.copies == 4


@pytest.mark.parametrize(("asked", "derived"), [(1, 1), (2, 2), (4, 4), ("auto", 4)])
def test_regrouping_degree_takes_no_ranks(asked, derived):
    dims = with_two_more(8, replicate=2, shard="auto", tensor=2, expert=asked)
    assert (dims.expert, dims.shard, dims.world_size, dims.batch) == (derived, 2, 8, 4)


def test_regrouping_degrees_divide_neighbors():
    assert refused(lambda: with_two_more(12, replicate=2, shard=3, tensor=2, expert=4)) == (
        "expert=4: must divide shard(3) x context(1) x tensor(2) = 6, the ranks that it regroups; try 1, 2, 3, 6"
    )
    rows, order = WithTwoMore.rows(), WithTwoMore.order()
    for row in rows.values():
        places = sorted(order.index(name) for name in row.regroups)
        assert places == list(range(places[0], places[-1] + 1)) if places else row.place is not None
    assert len({row.letter for row in rows.values()}) == len(rows)
    assert len({row.place for row in rows.values() if row.place is not None}) == len(order)
