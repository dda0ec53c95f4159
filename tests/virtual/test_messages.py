"""NCCL between two ranks: all types, reductions and collectives, and calls that do not match."""

import re
from typing import Any

import pytest

from tests.virtual.conftest import Start
from tests.virtual.messages import FORMATS

INVALID_USAGE = 5


@pytest.fixture(scope="module")
def answers(start: Start) -> dict[str, Any]:
    return start("messages")[0]


def test_reductions_of_all_types(answers):
    expected = {"sum": [4, 4, 6], "prod": [3, 4, 5], "max": [3, 2, 5], "min": [1, 2, 1], "avg": [2, 2, 3]}
    assert answers["reductions"] == {f"{t} {operation}": expected[operation] for t in FORMATS for operation in expected}


def test_sums_in_formats_of_sixteen_and_eight_bits(answers):
    # 1.75 is 1.11 in binary, whose exponent is that of 1.5; two bits of fraction hold it
    assert answers["formats"] == {"bfloat16": [0x3FE0], "e4m3": [0x3E], "e5m2": [0x3F]}


def test_collectives_bring_each_rank_what_is_its(answers):
    assert answers["collectives"] == {
        "ncclAllGather": [0, 1, 10, 11],
        "ncclBroadcast": [0, 1],
        "ncclReduceScatter": [2 + 12, 3 + 13],
        "ncclAlltoAll": [2, 3, 12, 13],
        "ncclReduce": [10, 12],
    }


def test_sums_of_what_is_multiplied_before(answers):
    assert answers["multiplied"] == [0.5 * 2 + 0.5 * 6]


def test_more_messages_in_a_group_than_are_kept_under_way(answers):
    assert answers["transfers"] == [5]


def test_large_messages_arrive_as_zeros(answers):
    assert answers["large"]


def test_a_communicator_is_split_in_the_order_of_keys(answers):
    assert answers["split"] == [0, 3]


def test_calls_that_do_not_match_fail_and_say_what_each_rank_called(answers):
    assert answers["mismatch"] == INVALID_USAGE
    assert re.search(r"do not match: rank 1 of 2 calls AllReduce .*rank 0 calls ReduceScatter", answers["errors"])
