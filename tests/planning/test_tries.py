"""Steps of other micro-batches, and steps that stand for longer ones."""

import pytest

from ptdbench.planning.tries import held, layouts, missing_sample_bytes, stand_in
from ptdbench.setup import run_spec
from ptdbench.setup.training_spec import TrainingSpec
from tests.conftest import read


def training(*words: str) -> TrainingSpec:
    return run_spec.specify(read("device=cpu", "cluster.ranks_per_node=2", *words), None).training


def test_micro_batches_divide_a_share_and_a_pipeline_has_as_many_as_stages() -> None:
    possible = layouts(training("parallel=fsdp", "train.global_batch=24"))
    assert {size: layout.accumulation for size, layout in possible.items()} == {1: 12, 2: 6, 3: 4, 4: 3, 6: 2, 12: 1}
    possible = layouts(training("parallel=pdp", "train.global_batch=12"))
    assert {size: layout.microbatches for size, layout in possible.items()} == {1: 12, 2: 6, 3: 4, 4: 3, 6: 2}
    assert [*layouts(training("parallel=pdp", "parallel.microbatches=4", "train.global_batch=16"))] == [1, 2, 4]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_batch_that_is_free_grows_with_the_micro_batch(schedule: str) -> None:
    """With as many micro-batches as ranks, also of a schedule that could run one, and would hold one."""
    possible = layouts(training("parallel=pdp", f"parallel.schedule={schedule}"), is_free=True)
    assert [possible[size].global_batch for size in (1, 4)] == [2, 8]


def test_two_passes_stand_for_more_whose_samples_are_all_there() -> None:
    made = training("parallel=fsdp", "train.global_batch=24")
    shorter = [stand_in(made, layout) for layout in layouts(made).values()]
    assert [(layout.global_batch, layout.accumulation) for layout in shorter] == [
        (4, 2), (8, 2), (12, 2), (16, 2), (24, 2), (24, 1)
    ]  # fmt: skip
    made = training("parallel=fsdp", "train.global_batch=24")
    size = sum(tensor.nbytes for tensor in made.data.example())
    assert [missing_sample_bytes(made, layout) // size for layout in layouts(made).values()] == [10, 8, 6, 4, 0, 0]


@pytest.mark.parametrize(("words", "bytes_of"), [
    (("parallel=ddp",), 0),
    (("parallel=fsdp", "parallel.reduce_scatter_each_microbatch=true"), 0),
    (("parallel=fsdp",), 4 * 10_952 // 2),  # of one of two shards
])  # fmt: skip
def test_what_ranks_hold_between_the_passes_of_a_step(words: tuple[str, ...], bytes_of: int) -> None:
    made = training("model=toy", "train.global_batch=8", *words)
    assert held(made, layouts(made), 3) == dict.fromkeys([1, 2], 3 * bytes_of)
