"""The search for the largest micro-batch, by needs that are known here."""

from collections.abc import Callable

import pytest

from ptdbench.planning.search import Search, Try

POWERS = [2**power for power in range(12)]


def searched(
    room: int, need: Callable[[int], int], candidates: list[int] = POWERS, *, tells: bool = True, most: int = 12
) -> Search:
    def attempt(size: int) -> Try:
        fits = need(size) <= room
        return Try(size, "ok" if fits else "oom", need(size) if fits or tells else None, fits)

    search = Search(candidates, room, attempt, most)
    search.largest()
    return search


@pytest.mark.parametrize("tells", [True, False], ids=["tells", "ends"])
@pytest.mark.parametrize("room", [9, 10, 11, 37, 100, 1000, 4105, 100_000])
def test_the_largest_that_fits_is_found_and_was_tried(room: int, tells: bool) -> None:
    def need(size: int) -> int:
        return 8 + 2 * size

    search = searched(room, need, tells=tells)
    fitting = [size for size in POWERS if need(size) <= room]
    assert search.best == (fitting[-1] if fitting else None)
    assert {attempt.micro_batch for attempt in search.tries} >= {*fitting[-1:]}
    assert len(search.tries) <= 4


@pytest.mark.parametrize("room", range(30, 4000, 123))
@pytest.mark.parametrize("tells", [True, False], ids=["tells", "ends"])
def test_needs_that_are_no_line_cost_more_tries_and_give_the_same_answer(room: int, tells: bool) -> None:
    def need(size: int) -> int:  # nothing grows at first, as other moments of the step need more
        return max(40, 7 * size + (13 if size % 3 else 0))

    candidates = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 96, 192]
    search = searched(room, need, candidates, tells=tells)
    assert search.best == max((size for size in candidates if need(size) <= room), default=None)
    assert len({attempt.micro_batch for attempt in search.tries}) == len(search.tries)


#: GB that a rank of gpt_small under FSDP needs: from 16 on each sample needs less, as pieces of the logits are full.
CONCAVE = {1: 2.14, 2: 2.84, 4: 4.62, 8: 6.83, 16: 9.27, 32: 14.31, 64: 24.12, 128: 44.12, 256: 84.1, 512: 164.1}


def test_on_gpus_of_ten_sizes_the_first_proposal_is_right_on_nine() -> None:
    right = 0
    for size in (2, 3, 4.5, 6, 9, 12, 20, 30, 45, 80):
        search = Search(
            [*CONCAVE],
            int(0.95e9 * size),
            lambda m, room=int(0.95e9 * size): Try(m, "ok", int(1e9 * CONCAVE[m]), 1e9 * CONCAVE[m] <= room),
            points=(8, 32),
        )
        assert search.largest() == max((m for m in CONCAVE if 1e9 * CONCAVE[m] <= search.room), default=None)
        tried = [attempt.micro_batch for attempt in search.tries]
        points = [m for m in tried if m in (1, 8, 32)]
        right += search.best is None or search.best in {*points, *tried[len(points) :][:1]}
    assert right >= 9


def test_a_search_without_tries_left_keeps_the_largest_and_no_line_is_trusted_beyond_its_stride() -> None:
    search = searched(1000, lambda size: 10 + size, list(range(1, 2000)), tells=False, most=3)
    assert [attempt.micro_batch for attempt in search.tries] == [1, 8, 990]
    assert search.best == 990
    search = Search(POWERS, 10**6, lambda size: Try(size, "ok", 10, True), stride=16)
    assert search.largest() == 2048
    assert [attempt.micro_batch for attempt in search.tries] == [1, 8, 128, 2048]


@pytest.mark.parametrize(("room", "expected"), [(20, None), (27, 8), (33, 8), (40, 8)])
@pytest.mark.parametrize("first", [None, 1, 2, 8])
@pytest.mark.parametrize("tells", [True, False], ids=["tells", "ends"])
def test_one_that_holds_no_gradients_fits_where_smaller_ones_do_not(room, expected, first, tells) -> None:
    """Whatever was tried first, as a plan tries the micro-batch that was given."""
    candidates, held = [1, 2, 4, 8], dict.fromkeys([1, 2, 4], 20)

    def attempt(size: int) -> Try:
        need = 10 + 2 * size + held.get(size, 0)
        return Try(size, "ok" if need <= room else "oom", need if need <= room or tells else None, need <= room)

    search = Search(candidates, room, attempt, held=held, tries=[attempt(first)] if first else [])
    assert search.largest() == expected
    assert len(search.tries) <= 3
    if not first:
        assert search.fitting() == [size for size in candidates if expected and attempt(size).fits]


@pytest.mark.parametrize(("stride", "expected"), [(0, 3), (64, 1)])
def test_one_that_nearly_fits_says_nothing_of_the_next_unless_needs_are_measured(stride, expected) -> None:
    needs = {1: 97, 2: 103, 3: 99, 4: 130}
    tries = [Try(2, "oom", needs[2], fits=False)]
    search = Search([*needs], 100, lambda m: Try(m, "ok", needs[m], needs[m] <= 100), stride=stride, tries=tries)
    assert search.largest() == expected
    assert len(search.tries) <= 3


def test_the_next_larger_one_is_tried_unless_it_is_far_too_large() -> None:
    close = searched(1000, lambda size: 9 * size, [10, 80, 111, 112])
    far = searched(1000, lambda size: 9 * size, [10, 80, 111, 222])
    assert [attempt.micro_batch for attempt in close.tries] == [10, 80, 111, 112]
    assert [attempt.micro_batch for attempt in far.tries] == [10, 80, 111]
