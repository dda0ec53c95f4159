"""``kernels=torch`` is what torch documents: the same kernels and memory as a script without ptdbench."""

from collections import Counter

import pytest

from tests.virtual.conftest import Start


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_step_is_that_of_torchs_recipe(start: Start, name):
    ours, plain = start("recipes")[name]
    assert ours["kernels"]["product"] > 30
    # The engine scales the loss by the number of micro-batches and adds up the losses of a step, here of one; from
    # torch 2.15 on, zeros are written by a memset, which is no elementwise kernel.
    extra = Counter(ours["kernels"])
    extra.subtract(plain["kernels"])
    assert {kind for kind, count in extra.items() if count} <= {"elementwise", "other"}
    assert (extra.total(), extra["elementwise"] in (5, 6)) == (6, True)
    assert ours["peak"] == pytest.approx(plain["peak"], rel=0.01)
