"""The arithmetic of a layout, over many worlds and batches."""

from __future__ import annotations

from itertools import product

import pytest

from ptdbench.parallel.layout import Layout, arrange, divisors
from ptdbench.problems import ConfigError

WORLDS = range(1, 9)
BATCHES = range(1, 25)
MICRO_BATCHES = ("auto", 1, 2, 3, 4, 6)
MICROBATCHES = ("auto", 1, 2, 3, 4)


def exists(world: int, batch: int, pipeline: int, micro_batch: object, microbatches: object) -> bool:
    """Whether numbers can be found by trying: data * accumulation * microbatches * micro_batch = batch."""
    if world % pipeline:
        return False
    data = world // pipeline
    accumulations = range(1, batch + 1) if "auto" not in (micro_batch, microbatches) else [1]
    sizes = range(1, batch + 1) if micro_batch == "auto" else [micro_batch]
    counts = range(1, batch + 1) if microbatches == "auto" else [microbatches]
    return any(data * a * m * s == batch for a, m, s in product(accumulations, counts, sizes))


def test_a_layout_is_found_exactly_where_there_is_one_and_its_factors_multiply_to_the_batch():
    found = refused = 0
    for world, batch, pipeline, size, count in product(WORLDS, BATCHES, (1, 2, 3, 4), MICRO_BATCHES, MICROBATCHES):
        case = (world, batch, pipeline, size, count)
        try:
            layout = arrange(world, batch, size, pipeline=pipeline, microbatches=count)
        except ConfigError:
            refused += 1
            assert not exists(world, batch, pipeline, size, count), case
            continue
        found += 1
        assert layout.data * layout.pipeline == layout.world_size == world, case
        factors = layout.data * layout.accumulation * layout.microbatches * layout.micro_batch
        assert factors == layout.global_batch == batch, case
        assert layout.pipeline == pipeline, case
        assert size in ("auto", layout.micro_batch), case
        assert count in ("auto", layout.microbatches), case
        if "auto" in (size, count):
            assert layout.accumulation == 1, case
    assert found > 1000
    assert refused > 1000


def test_the_rows_of_all_replicas_are_every_sample_exactly_once():
    for world, pipeline, multiple in product(WORLDS, (1, 2, 3), (1, 2, 5)):
        if world % pipeline:
            continue
        layout = arrange(world, world // pipeline * multiple, pipeline=pipeline, microbatches="auto")
        taken = [
            sample
            for step in range(3)
            for replica in range(layout.data)
            for sample in range(*layout.rows(step, replica))
        ]
        assert taken == list(range(3 * layout.global_batch))


def test_the_samples_of_a_step_do_not_depend_on_the_layout():
    for layout in (arrange(1, 12), arrange(4, 12), arrange(6, 12, 1, pipeline=2, microbatches="auto")):
        rows = [layout.rows(5, replica) for replica in range(layout.data)]
        assert (rows[0][0], rows[-1][1]) == (60, 72)


@pytest.mark.parametrize(("share", "stages"), [(16, 2), (16, 4), (12, 3), (7, 2), (6, 4), (100, 4)])
def test_automatic_micro_batches_keep_the_stages_busy(share, stages):
    layout = arrange(stages, share, pipeline=stages, microbatches="auto")
    enough = [number for number in range(2 * stages, share + 1) if share % number == 0]
    assert layout.microbatches == (enough[0] if enough else share)


def test_without_a_pipeline_there_is_one_micro_batch_of_everything():
    assert arrange(2, 16) == Layout(2, 1, 16, 8, 1, 1)
    assert arrange(2, 16, 2) == Layout(2, 1, 16, 2, 1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"world_size": 4, "global_batch": 17},
            "train.global_batch=17: must be a multiple of the number of data-parallel replicas, 4; try 16, 20",
        ),
        (
            {"world_size": 4, "global_batch": 3},
            "train.global_batch=3: must be a multiple of the number of data-parallel replicas, 4; try 4",
        ),
        (
            {"world_size": 2, "global_batch": 24, "micro_batch": 5},
            "train.micro_batch=5: must divide a replica's share of the batch, 12; try 3, 4, 6",
        ),
        (
            {"world_size": 6, "global_batch": 24, "pipeline": 4},
            "parallel.pipeline_size=4: must divide the world size, 6; try 2, 3, 6",
        ),
        (
            {"world_size": 2, "global_batch": 12, "pipeline": 2, "microbatches": 5},
            "parallel.microbatches=5: must divide a replica's share of the batch, 12; try 3, 4, 6",
        ),
        (
            {"world_size": 2, "global_batch": 12, "micro_batch": 2, "pipeline": 2, "microbatches": 4},
            "parallel.microbatches=4: must divide the micro-batches of a replica's step, 6; try 2, 3, 6",
        ),
    ],
)
def test_a_refusal_names_numbers_that_would_do(arguments, message):
    with pytest.raises(ConfigError) as caught:
        arrange(**arguments)
    assert str(caught.value) == message


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_a_record_holds_the_numbers_by_name():
    assert arrange(2, 16, 2).as_dict() == {
        "data": 2, "pipeline": 1, "global_batch": 16, "micro_batch": 2, "microbatches": 1, "accumulation": 4,
    }  # fmt: skip
