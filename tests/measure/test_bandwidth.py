"""Bandwidths by the definitions of nccl-tests."""

import pytest

from ptdbench.measure.operations import OPERATIONS

#: The factors of doc/PERFORMANCE.md worked out by hand.
_PARTS, _WHOLE = {2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875}, {2: 1, 3: 1, 4: 1, 8: 1}
WORKED = {
    "all_reduce": {2: 1, 3: 4 / 3, 4: 1.5, 8: 1.75}, "broadcast": _WHOLE, "reduce": _WHOLE,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), _PARTS),
}  # fmt: skip


@pytest.mark.parametrize("op", WORKED)
def test_bus_bandwidth_of_worked_examples(op):
    assert {ranks: OPERATIONS[op].bus_factor(ranks) for ranks in (2, 3, 4, 8)} == pytest.approx(WORKED[op])


def test_a_barrier_moves_no_data():
    assert {op for op, operation in OPERATIONS.items() if operation.bus_factor is None} == OPERATIONS.keys() - WORKED
