"""The library without torch: memory, copies, clocks and errors, by the figures of the device."""

from typing import Any

import pytest

from tests.virtual.conftest import DEVICE, GIB, Start

MIB = 1 << 20

#: cudaError_t and CUresult.
INVALID, OUT_OF_MEMORY, NOT_INITIALIZED, BAD_HANDLE, NOT_SUPPORTED = 1, 2, 3, 400, 801


@pytest.fixture(scope="module")
def answers(start: Start) -> dict[str, Any]:
    return start("calls")


def test_memory_has_pages_reads_as_zeros_and_ends_after_the_context(answers):
    memory = answers["memory"]
    assert memory["start"] == DEVICE.memory - DEVICE.context
    assert memory["page"] == 2 * MIB
    assert (memory["all_of_it"], memory["over"]) == (0, OUT_OF_MEMORY)
    assert memory["end"] == memory["start"]
    assert memory["free_twice"] == INVALID
    assert answers["memory"]["same_place"]
    assert answers["memory"]["read_again"] == 0


def test_devices_have_a_context_once_used_and_their_names_and_no_forks(answers):
    assert answers["contexts"] == [[0, 0], [1, 0], [1, 1]]
    assert answers["names"] == {"statuses": [0, 0, 0, 0, INVALID + 1], "count": 2, "name": f"virtual {DEVICE.name}"}
    assert answers["fork"] == NOT_INITIALIZED


def test_addresses_outlast_memory(answers):
    """An expandable segment takes 9/8 of a device's memory for each pool and stream: 163 of a GPU of 178 GiB."""
    assert answers["addresses"]["count"] * DEVICE.memory > 160 * 178 * GIB
    assert answers["addresses"]["status"] == NOT_SUPPORTED


def test_small_copies_are_exact_and_large_ones_zeros(answers):
    copies = answers["copies"]
    assert copies["small"]
    assert copies["large"]
    assert copies["grown"] < 600 * MIB, "3 GiB were copied and 12 GiB set"
    assert copies["outside"] == INVALID


def test_events_count_work_which_takes_no_time(answers):
    assert answers["clocks"] == {"milliseconds": pytest.approx(3 * 0.1), "never": BAD_HANDLE, "queries": [0, 0]}


def test_unimplemented_call_fails_and_is_named_once(answers):
    assert answers["unanswered"] == [NOT_SUPPORTED, NOT_SUPPORTED, 15]
    assert [line for line in answers["errors"].splitlines() if "nothing answers" in line] == [
        "virtual GPU: nothing answers cudaGraphNodeGetDependencies",
        "virtual GPU: nothing answers cublasDtrsm_v2",
    ]
