"""Degrees of parallelism: which are derived, and which do not fit; how a batch falls onto the ranks."""

import math
from dataclasses import dataclass
from itertools import product

import pytest

from ptdbench.parallel.dims import BatchPlan, Dims, check_share, degree, derive
from ptdbench.parallel.strategy import Strategy
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


@pytest.mark.parametrize(("requested", "derived"), [(1, 1), (2, 2), (4, 4), ("auto", 4)])
def test_regrouping_degree_takes_no_ranks(requested, derived):
    dims = with_two_more(8, replicate=2, shard="auto", tensor=2, expert=requested)
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


WORLDS = range(1, 9)
BATCHES = range(1, 25)
MICRO_BATCHES = ("auto", 1, 2, 3, 4, 6)
MICROBATCHES = ("auto", 1, 2, 3, 4)


def arrange(world, batch, pipeline, micro_batch, microbatches):
    """Without a pipeline there is one micro-batch in each pass."""
    options = {} if pipeline == 1 else {"microbatches": microbatches, "schedule": "gpipe"}
    strategy = Strategy(replicate="auto", pipeline=pipeline, **options)
    dims = strategy.dims(world)
    check_share(dims.batch, batch, micro_batch)
    return strategy.layout(dims, batch, micro_batch)


def exists(world: int, batch: int, pipeline: int, micro_batch: object, microbatches: object) -> bool:
    """Whether numbers can be found by trying: replicas * accumulation * microbatches * micro_batch = batch."""
    if world % pipeline:
        return False
    replicas = world // pipeline
    accumulations = range(1, batch + 1) if "auto" not in (micro_batch, microbatches) else [1]
    sizes = range(1, batch + 1) if micro_batch == "auto" else [micro_batch]
    counts = range(1, batch + 1) if microbatches == "auto" else [microbatches]
    return any(replicas * a * m * s == batch for a, m, s in product(accumulations, counts, sizes))


def test_layout_exists_iff_factors_multiply_to_batch():
    accepted = refused = 0
    for case in product(WORLDS, BATCHES, (1, 2, 3, 4), MICRO_BATCHES, MICROBATCHES):
        world, batch, pipeline, size, count = case
        if pipeline == 1 and count != 1:
            continue
        try:
            layout = arrange(*case)
        except ConfigError:
            refused += 1
            assert not exists(*case), case
            continue
        accepted += 1
        assert layout.dims == Dims(replicate=world // pipeline, pipeline=pipeline), case
        factors = layout.replicas * layout.accumulation * layout.microbatches * layout.micro_batch
        assert factors == layout.global_batch == batch, case
        assert size in ("auto", layout.micro_batch), case
        assert count in ("auto", layout.microbatches), case
        if "auto" in (size, count):
            assert layout.accumulation == 1, case
    assert accepted > 1000
    assert refused > 1000


def test_replicas_take_every_sample_once():
    for replicate, shard, pipeline, multiple in product((1, 2, 3), (1, 2), (1, 2), (1, 2, 5)):
        replicas = replicate * shard
        layout = BatchPlan(Dims(replicate=replicate, shard=shard, pipeline=pipeline), replicas * multiple, 1, multiple)
        taken = [
            sample
            for step in range(3)
            for replica in range(layout.replicas)
            for sample in range(*layout.rows(step, replica))
        ]
        assert taken == list(range(3 * layout.global_batch))


@pytest.mark.parametrize(("arguments", "message"), [
    ((4, 17, "auto"), "global_batch=17: must be a multiple of … replicas, 4; try 16, 20"),
    ((4, 3, "auto"), "global_batch=3: must be a multiple of the number of data-parallel replicas, 4; try 4"),
    ((2, 24, 5), "micro_batch=5: must divide a replica's share of the batch, 12; try 3, 4, 6"),
])  # fmt: skip
def test_a_refusal_names_numbers_that_fit(arguments, message):
    assert refused(check_share, *arguments) == Abridged(message)


def test_a_record_holds_the_numbers_by_name():
    assert BatchPlan(Dims(replicate=2, shard=3, pipeline=2), 24, 2, 2, 1).as_dict() == {
        "data": 6, "replicate": 2, "shard": 3, "context": 1, "tensor": 1, "pipeline": 2, "expert": 1,
        "global_batch": 24, "micro_batch": 2, "microbatches": 2, "accumulation": 1,
    }  # fmt: skip
