"""The time of a step, predicted from the logs of the ranks that ran, for a plan or of any program; without torch."""

from collections.abc import Sequence

from ptdbench.prediction import steps, trace
from ptdbench.prediction.costs import Costs, NoCosts
from ptdbench.prediction.log import Log
from ptdbench.problems import Problem, require
from ptdbench.records.schema import Predicted
from ptdbench.virtual.device import Device

#: How far an absolute time may be off without an anchor, as a factor: the level of a device, its power limit and its
#: software, which all layouts share, is the largest unknown.
_LEVEL = 1.25


def obstacle(gpu: Device, nodes: int) -> str | None:
    """Return why the time of a step on nodes with virtual GPUs cannot be predicted; ``None`` if it may.

    Raises ConfigError if costs that were measured on the GPU cannot be used.
    """
    try:
        Costs.of(gpu)
    except NoCosts as lacking:
        require(Problem("virtual.gpu.costs", gpu.costs, str(lacking)) if gpu.costs else None)
        return str(lacking)
    return "messages between nodes have no costs yet" if nodes > 1 else None


def predicted(logs: Sequence[Log], gpu: Device, passes: int | None = None) -> Predicted:
    """Return the predicted step, without rates, or the reason why there is none.

    Args:
        logs: Of a rank of each class, or of all ranks.
        gpu: The GPU of each rank.
        passes: The passes of the step, if the logs have fewer.
    """
    try:
        step = steps.predict(logs, Costs.of(gpu), passes)
    except ValueError as lacking:  # without costs or steps, or ranks that do not fit together
        return Predicted(reason=str(lacking))
    return Predicted(
        step_seconds=step.seconds,
        low=step.seconds / _LEVEL,
        high=step.seconds * _LEVEL,
        bound_by=step.bound_by,
        parts={family: seconds for family, seconds in step.parts.items() if seconds},
        phases={name: seconds for name, seconds in trace.phases(step).seconds.items() if seconds},
        errors=dict(step.errors),
        twice_as_fast=step.twice_as_fast(),
        guessed_bytes=step.guessed_bytes,
    )
