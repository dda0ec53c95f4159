"""Bandwidths by the definitions of nccl-tests."""

import pytest

from ptdbench.measure.bandwidth import FACTORS, bus_bandwidth

#: The factors of doc/PERFORMANCE.md worked out by hand.
_PARTS, _WHOLE = {2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875}, {2: 1, 3: 1, 4: 1, 8: 1}
WORKED = {
    "all_reduce": {2: 1, 3: 4 / 3, 4: 1.5, 8: 1.75}, "broadcast": _WHOLE, "reduce": _WHOLE,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), _PARTS),
}  # fmt: skip


@pytest.mark.parametrize("op", FACTORS)
def test_bus_bandwidth_of_worked_examples(op):
    # 12 MB in 3 ms: an algorithm bandwidth of 4 GB/s.
    rates = {ranks: bus_bandwidth(op, 12_000_000, 0.003, ranks) for ranks in (2, 3, 4, 8)}
    assert rates == pytest.approx({ranks: 4e9 * factor for ranks, factor in WORKED[op].items()})
