"""Objective of a sweeper that searches: one figure of a run's record."""

from __future__ import annotations

from typing import Literal

from ptdbench.records.schema import Metrics, Written, part

Objective = Literal["throughput", "held_out_loss", "held_out_accuracy"]

#: In which direction each objective is better.
DIRECTIONS: dict[Objective, Literal["maximize", "minimize"]] = {
    "throughput": "maximize",
    "held_out_loss": "minimize",
    "held_out_accuracy": "maximize",
}


def value(record: Written, objective: Objective) -> float | None:
    """Return the figure by which a run is judged; ``None`` for a run that is not ok, or has no such figure.

    ``throughput``: tokens per second, or samples per second where samples are not tokens. The others are those of the
    best evaluation.
    """
    if record["status"] != "ok":
        return None
    if objective == "throughput":
        metrics = part(record, Metrics)
        return metrics.tokens_per_second or metrics.samples_per_second
    name = {"held_out_loss": "loss", "held_out_accuracy": "top1"}[objective]
    found = [figure for one in record.get("evaluations") or [] if (figure := one.get(name)) is not None]
    best = max if DIRECTIONS[objective] == "maximize" else min
    return best(found) if found else None
