"""The runs of a command line: their order, in blocks of repeats, and their directories."""

import pytest

from ptdbench.setup import runs
from ptdbench.setup.compose import compose_all
from ptdbench.setup.config import Repeat
from ptdbench.setup.runs import order


def repeat(runs, *, most=20, seed=0, block=None):
    return Repeat(runs=runs, max=most, tied_within=0.02, seed=seed, block=block, series=None)


def in_blocks(ordered):
    """The alternatives of each block, in order; a run that stands in another's block would show."""
    blocks = {}
    for number, block in ordered:
        blocks.setdefault(block, []).append(number)
    assert ordered == [(number, block) for block, numbers in blocks.items() for number in numbers]
    return blocks


class TestOrder:
    def test_every_block_has_each_alternative_once_and_every_second_one_is_reversed(self):
        """A machine that gets slower by the same amount with each run slows all alternatives by the same sum."""
        ordered = order(5, repeat(8))
        blocks = in_blocks(ordered)
        assert list(blocks) == list(range(8))
        for block in range(0, 8, 2):
            assert sorted(blocks[block]) == [0, 1, 2, 3, 4]
            assert blocks[block + 1] == blocks[block][::-1]
        slowed = [sum(place for place, (other, _) in enumerate(ordered) if other == number) for number in range(5)]
        assert len(set(slowed)) == 1

    def test_the_order_is_drawn_by_the_seed_and_stays_where_blocks_are_added(self):
        orders = [tuple(numbers) for numbers in in_blocks(order(6, repeat(20))).values()]
        assert len(set(orders)) > 15
        assert order(6, repeat(20)) == order(6, repeat(20))
        assert order(6, repeat(20, seed=1)) != order(6, repeat(20))
        assert order(3, repeat(5))[:6] == order(3, repeat(2))
        assert order(3, repeat("auto", most=5)) == order(3, repeat(5))

    @pytest.mark.parametrize("runs", [5, "auto"])
    def test_one_block_has_the_order_that_it_has_among_all(self, runs):
        whole = in_blocks(order(6, repeat(runs)))
        for block in range(5):
            alone = order(6, repeat(runs, block=block))
            assert alone == [(number, None) for number in whole[block]]  # each has the block that was typed

    def test_without_repeats_runs_keep_their_order_and_get_no_block(self):
        assert order(3, repeat(1, seed=7)) == [(0, None), (1, None), (2, None)]
        assert order(2, repeat(1, block=4)) == [(0, None), (1, None)]  # each has the one that was typed


@pytest.mark.parametrize(("typed", "names"), [
    (["parallel=ddp,fsdp", "seed=3"], ["0_toy_ddp", "1_toy_fsdp"]),
    (["optimizer.lr=0.1,1e30", "repeat.seed=4"], ["0_toy_ddp_lr-0.1", "1_toy_ddp_lr-1e+30"]),
    (["seed=1,2", "data.seed=3,4", "precision=fp32,bf16"], ["0_toy_ddp_seed-1_data.seed-3_precision-fp32"]),
    (["+model.a='x/y','z'", "hydra.sweep.subdir='${hydra.job.num}{swept}'"], ["0_a-x-y", "1_a-z"]),
])  # fmt: skip
def test_a_directory_has_the_options_that_the_sweep_varies(typed, names):
    found = runs.of(compose_all(["model=toy", *typed], multirun=True))
    assert [run.subdirectory for run in found][: len(names)] == names
