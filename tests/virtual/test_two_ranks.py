"""torch's process groups on two virtual GPUs."""

from typing import Any

import pytest

from tests.virtual.conftest import Start


@pytest.fixture(scope="module")
def answers(start: Start) -> list[dict[str, Any]]:
    return start("two_ranks", ranks=2)


def test_all_groups_are_as_patient_as_the_watchdog_and_more(answers):
    """Three times 20 minutes for a first step, and half an hour: torch gives groups of a mesh 10 minutes."""
    assert [rank["patience"] for rank in answers] == [[10, 90, 90]] * 2


def test_a_checkpoint_is_saved_aside_on_the_device_of_its_rank(answers):
    assert [rank["saving"] for rank in answers] == [0, 1]


def test_nothing_is_said_on_the_way(answers):
    assert [line for rank in answers for line in rank["errors"].splitlines() if "virtual" in line] == []
