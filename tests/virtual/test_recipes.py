"""``kernels=torch`` is what torch documents: the same kernels and memory as a script without ptdbench."""

import pytest

from tests.virtual.conftest import Start


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_step_is_that_of_torchs_recipe(start: Start, name):
    ours, plain = start("recipes")[name]
    assert ours["kernels"]["product"] > 30
    # The engine scales the loss by the number of micro-batches and adds up the losses of a step, here of one.
    assert ours["kernels"] == plain["kernels"] | {"elementwise": plain["kernels"]["elementwise"] + 6}
    assert ours["peak"] == pytest.approx(plain["peak"], rel=0.01)
