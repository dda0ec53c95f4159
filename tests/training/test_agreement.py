from __future__ import annotations

import math

from ptdbench.training import agreement


def test_a_series_that_was_not_kept_before_begins_where_it_belongs():
    found = agreement._one_after_the_other([], [3.0, 4.0], 2)
    assert all(math.isnan(value) for value in found[:2])
    assert found[2:] == [3.0, 4.0]


def test_a_series_that_is_not_kept_any_more_ends():
    assert agreement._one_after_the_other([1.0, 2.0], [], 2) == [1.0, 2.0]


def test_two_stretches_are_one():
    assert agreement._one_after_the_other([1.0, 2.0], [3.0], 2) == [1.0, 2.0, 3.0]
