from __future__ import annotations

import random
from itertools import combinations

import pytest

from ptdbench.parallel.pipeline.partition import balance


def slowest(costs: list[float], cuts: list[range]) -> float:
    return max(sum(costs[part] for part in cut) for cut in cuts)


def all_cuts(parts: int, stages: int) -> list[list[range]]:
    """Every way of cutting, by trying."""
    return [
        [range(start, stop) for start, stop in zip((0, *inner), (*inner, parts), strict=True)]
        for inner in combinations(range(1, parts), stages - 1)
    ]


def test_no_other_cut_has_a_faster_slowest_stage():
    dice = random.Random(0)
    for _ in range(300):
        costs = [float(dice.choice((0, 1, 2, 3, 5, 8, 40))) for _ in range(dice.randint(1, 9))]
        stages = dice.randint(1, len(costs))
        cuts = balance(costs, stages)
        assert [part for cut in cuts for part in cut] == list(range(len(costs)))
        assert len(cuts) == stages
        assert all(cuts)
        possible = all_cuts(len(costs), stages)
        best = min(slowest(costs, other) for other in possible)
        assert slowest(costs, cuts) == best
        equal = [other for other in possible if slowest(costs, other) == best]
        assert len(cuts[0]) == min(len(other[0]) for other in equal)


def test_a_heavy_head_has_a_stage_to_itself():
    assert balance([0, 1, 1, 1, 1, 10], 2) == [range(5), range(5, 6)]


def test_early_stages_are_the_shorter_ones():
    assert balance([1, 1, 1], 2) == [range(1), range(1, 3)]


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_parts_cannot_be(stages):
    with pytest.raises(ValueError, match=f"{stages} stages cannot be made of 3 parts"):
        balance([1, 1, 1], stages)
