"""What a run with experts tells of them: who got how many tokens."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.training.loop import StepLoop


def field(job: Job, loop: StepLoop) -> dict[str, Any] | None:
    """The record's field ``experts``, see :class:`ptdbench.records.schema.Experts`; called in all ranks."""
    if job.spec.virtual:  # its experts take turns, and nothing is counted
        return None
    of_ranks: list[tuple[dict[str, list[float]], list[float]]] = gather(loop.engine.routed())
    counts = {name: numbers for of_rank, _ in of_ranks for name, numbers in of_rank.items()}
    if not any(map(any, counts.values())):  # no experts, or no steps
        return None
    fullest = [ratio for _, of_rank in of_ranks for ratio in of_rank]
    return {
        "tokens": {name: [round(number) for number in numbers[:-1]] for name, numbers in sorted(counts.items())},
        "dropped": round(sum(numbers[-1] for numbers in counts.values())),
        "fullest_rank": fmean(fullest) if fullest else None,
    }
