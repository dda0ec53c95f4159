"""How a batch falls onto the ranks, over many worlds and batches."""

from itertools import product

import pytest

from ptdbench.parallel.dims import BatchPlan, Dims, check_share
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from tests.parallel.made import refused
from tests.refusals import Abridged

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
