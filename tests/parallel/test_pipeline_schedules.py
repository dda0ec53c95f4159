from collections import deque
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ptdbench.parallel.pipeline_schedules import SCHEDULES

#: Times of what a schedule orders, for one micro-batch and all stages of a rank.
COSTS = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}


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
        ("gpipe", 3 / 11), ("1f1b", 3 / 11), ("interleaved1f1b", 1.5 / 9.5), ("interleaved_zero_bubble", 1.5 / 25.5),
        ("zbv", 0), ("dualpipev", 3 / 27),
    ],
)  # fmt: skip
def test_the_bubble_of_a_schedule(name, bubble):
    schedule = SCHEDULES[name]
    assert schedule.bubble(4, schedule.per_rank("auto"), 8) == pytest.approx(bubble)


@pytest.mark.parametrize("name", ["interleaved1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv"])
def test_bubble_equals_torchs_order(name):
    schedule = SCHEDULES[name]
    for ranks, per_rank, microbatches in product((2, 3, 4), (2,) if name == "zbv" else (2, 3), range(1, 9)):
        if schedule.accepts(microbatches, ranks, per_rank):
            idle = idle_in(order_of(name, ranks, per_rank, microbatches), ranks * per_rank, per_rank)
            is_unknown = microbatches < {"interleaved_zero_bubble": ranks, "zbv": 2 * ranks - 1}.get(name, 0)
            formula = schedule.bubble(ranks, per_rank, microbatches)
            assert formula == (None if is_unknown else pytest.approx(idle)), (ranks, per_rank, microbatches)


def order_of(name: str, ranks: int, per_rank: int, microbatches: int) -> dict[int, list[Any]]:
    """What each rank does in a pass, in the order of torch's schedule."""
    schedule, stages = SCHEDULES[name], ranks * per_rank
    first_ranks = [
        SimpleNamespace(
            num_stages=stages, group_size=ranks, group_rank=0, stage_index=number, is_first=number == 0,
            is_last=number == stages - 1, submod=nn.Identity(),
        )
        for number, rank in enumerate(schedule.ranks(ranks, per_rank)) if rank == 0
    ]  # fmt: skip
    made: Any = schedule.make(first_ranks, microbatches, lambda outputs, _: outputs)  # type: ignore[arg-type]
    return {rank: [action for action in actions if action] for rank, actions in made.pipeline_order.items()}


def idle_in(order: dict[int, list[Any]], stages: int, per_rank: int) -> float:
    """The idle fraction of the rank that takes longest, if all do what they can as soon as they can."""
    waiting = {rank: deque(actions) for rank, actions in order.items()}
    ends: dict[tuple[str, int, int], float] = {}  # of forward and backward passes, by stage and micro-batch
    first, free = dict[int, float](), dict.fromkeys(order, 0.0)
    while any(waiting.values()):
        before = len(ends)
        for rank, actions in waiting.items():
            while actions:
                action = actions[0]
                kind, stage, number = action.computation_type.name, action.stage_index, action.microbatch_index
                needs = [("forward", stage - (kind == "FORWARD"), number)] * (stage > 0 or kind != "FORWARD")
                if "BACKWARD" in kind and stage < stages - 1:
                    needs.append(("backward", stage + 1, number))
                if not all(need in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                first.setdefault(rank, start)
                free[rank] = start + COSTS[kind] / per_rank
                if kind != "BACKWARD_WEIGHT":
                    ends["forward" if kind == "FORWARD" else "backward", stage, number] = free[rank]
                actions.popleft()
        assert len(ends) > before or not any(waiting.values())
    longest = max(order, key=lambda rank: free[rank] - first[rank])
    busy = sum(COSTS[action.computation_type.name] for action in order[longest]) / per_rank
    return 1 - busy / (free[longest] - first[longest])
