"""NCCL between two ranks: all types, reductions and collectives, and calls that do not match."""

import re
from typing import Any

import pytest

from tests.virtual.conftest import Start
from tests.virtual.messages import FORMATS

INVALID_USAGE = 5
REDUCED = {"sum": [4, 4, 6], "prod": [3, 4, 5], "max": [3, 2, 5], "min": [1, 2, 1], "avg": [2, 2, 3]}
COLLECTED = {
    "ncclAllGather": [0, 1, 10, 11], "ncclBroadcast": [0, 1], "ncclReduceScatter": [2 + 12, 3 + 13],
    "ncclAlltoAll": [2, 3, 12, 13], "ncclReduce": [10, 12],
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(start: Start) -> dict[str, Any]:
    return start("messages")


@pytest.mark.parametrize(("question", "expected"), [
    ("reductions", {f"{of} {operation}": result for of in FORMATS for operation, result in REDUCED.items()}),
    # 1.75 is 1.11 in binary, whose exponent is that of 1.5; two bits of fraction hold it
    ("formats", {"bfloat16": [0x3FE0], "e4m3": [0x3E], "e5m2": [0x3F]}),
    ("collectives", COLLECTED),
    ("multiplied", [0.5 * 2 + 0.5 * 6]),
    ("transfers", [5]),  # more messages in a group than are kept under way
    ("large", True),  # it arrives as zeros
    ("objects", [[1, 2], [1]]),
    ("split", [0, 3]),  # in the order of keys
])  # fmt: skip
def test_collectives_give_each_rank_its_result(answers, question, expected):
    assert answers[question] == expected


def test_mismatched_calls_are_named(answers):
    assert answers["mismatch"] == INVALID_USAGE
    assert re.search(r"do not match: rank 1 of 2 calls AllReduce .*rank 0 calls ReduceScatter", answers["errors"])
