"""torch's process groups, DDP and FSDP2 on two virtual GPUs."""

from typing import Any

import pytest

from tests.virtual.conftest import Start

#: Bytes of the parameters of one layer.
LAYER = 512 * 512 * 4


@pytest.fixture(scope="module")
def answers(start: Start) -> list[dict[str, Any]]:
    return start("two_ranks", ranks=2)


def test_objects_reach_all_ranks(answers):
    for rank in answers:
        assert rank["objects"] == {"gathered": [0, 100], "sent": [["of rank 0"]], "received": ["for rank 1"]}


def test_small_tensors_are_reduced(answers):
    for rank in answers:
        assert rank["numbers"] == {"total": [3.0, 5.0], "most": [7, 3]}


def test_ddp_holds_parameters_and_buckets(answers):
    assert [rank["replicated"] for rank in answers] == [2 * LAYER, 2 * LAYER]


def test_fsdp_holds_shards_of_parameters_and_gradients(answers):
    halves = 2 * LAYER // 2  # of two layers
    assert [rank["sharded"] for rank in answers] == [2 * halves, 2 * halves]


def test_all_groups_are_as_patient_as_the_watchdog_and_more(answers):
    """Three times 20 minutes for a first step, and half an hour: torch gives groups of a mesh 10 minutes."""
    assert [rank["patience"] for rank in answers] == [[10, 90, 90]] * 2


def test_nothing_is_said_on_the_way(answers):
    assert [line for rank in answers for line in rank["errors"].splitlines() if "virtual" in line] == []
