import pytest

from ptdbench.parallel.pipeline.schedules import SCHEDULES


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", [0, 1, 2]), ("looped_bfs", [0, 1, 2, 0, 1, 2]), ("zbv", [0, 1, 2, 2, 1, 0])]
)
def test_stages_lie_in_a_loop_or_a_v(name, ranks):
    schedule = SCHEDULES[name]
    assert schedule.ranks(3, schedule.per_rank("auto")) == ranks


@pytest.mark.parametrize(
    ("name", "bubble"),
    # of 4 ranks and 8 micro-batches, by hand: the idle part of what the longest rank takes
    [
        ("gpipe", 3 / 11),
        ("1f1b", 3 / 11),
        ("interleaved1f1b", 1.5 / 9.5),
        ("interleaved_zero_bubble", 1.5 / 25.5),
        ("zbv", 0),
        ("dualpipev", 3 / 27),
    ],
)
def test_the_bubble_of_a_schedule(name, bubble):
    schedule = SCHEDULES[name]
    assert schedule.bubble(4, schedule.per_rank("auto"), 8) == pytest.approx(bubble)
