from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ptdbench.profiling.events import intersect, length, subtract, union

#: Sets of whole seconds, as intervals and as the seconds in them.
INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


def seconds(intervals) -> set[int]:
    return {second for start, end in intervals for second in range(start, end)}


@given(INTERVALS)
def test_union_is_disjoint_and_sorted(some):
    found = union(some)
    assert seconds(found) == seconds(some)
    assert length(found) == len(seconds(some))
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(INTERVALS, INTERVALS)
def test_intersection_and_difference_are_those_of_sets(some, others):
    some, others = union(some), union(others)
    assert seconds(intersect(some, others)) == seconds(some) & seconds(others)
    assert seconds(subtract(some, others)) == seconds(some) - seconds(others)
    assert length(intersect(some, others)) + length(subtract(some, others)) == length(some)
