"""The time of a step, predicted from the logs of the ranks that ran for a plan."""

from __future__ import annotations

from collections.abc import Sequence

from ptdbench.parallel import precision
from ptdbench.parallel.batch import BatchPlan
from ptdbench.prediction import steps, trace
from ptdbench.prediction.costs import Costs, NoCosts
from ptdbench.prediction.log import Log
from ptdbench.problems import Problem, require
from ptdbench.records.schema import Predicted
from ptdbench.setup.run_spec import RunSpec
from ptdbench.setup.training_spec import Flops

#: How far an absolute time may be off without an anchor, as a factor: the level of a device, its power limit and its
#: software, which all layouts share, is the largest unknown.
_LEVEL = 1.25


def obstacle(spec: RunSpec, stages: int) -> str | None:
    """Return why the time of a run on virtual GPUs cannot be predicted; ``None`` if it may.

    Raises ConfigError if costs that were measured on the GPU cannot be used.

    Args:
        spec: The run.
        stages: The number of pipeline stages with a rank that runs.
    """
    assert spec.virtual and spec.training  # noqa: PT018 - one fact
    try:
        Costs.of(spec.virtual.gpu)
    except NoCosts as lacking:
        costs = spec.virtual.gpu.costs
        require(Problem("virtual.gpu.costs", costs, str(lacking)) if costs else None)
        return str(lacking)
    if spec.config.cluster.nodes not in ("auto", 1):
        return "messages between nodes have no costs yet"
    if spec.training.layout.dims.pipeline > stages:
        return "not all stages of the pipeline ran"
    return None


def predicted(logs: Sequence[Log], spec: RunSpec, layout: BatchPlan, passes: int | None) -> Predicted:
    """Return the predicted step of a run, or the reason why there is none.

    Args:
        logs: Of a rank of each class.
        spec: The run.
        layout: The layout that the step is for.
        passes: Its passes, if the logs have fewer.
    """
    assert spec.virtual and spec.training  # noqa: PT018 - one fact
    try:
        step = steps.predict(logs, Costs.of(spec.virtual.gpu), passes)
    except ValueError as lacking:  # without costs or steps, or ranks that do not fit together
        return Predicted(reason=str(lacking))
    rate = layout.global_batch / step.seconds
    tokens, peaks = spec.training.data.tokens_per_sample, spec.virtual.gpu.peaks
    flops = Flops.of(spec.training.model).per_sample
    peak = peaks.get(precision.arithmetic(spec.config.general.precision, "cuda"))
    return Predicted(
        step_seconds=step.seconds,
        low=step.seconds / _LEVEL,
        high=step.seconds * _LEVEL,
        tokens_per_second=rate * tokens if tokens else None,
        samples_per_second=rate,
        mfu=rate * flops / spec.world_size / peak if flops and peak else None,
        bound_by=step.bound_by,
        parts={family: seconds for family, seconds in step.parts.items() if seconds},
        phases={name: seconds for name, seconds in trace.phases(step).seconds.items() if seconds},
        errors=dict(step.errors),
        twice_as_fast=step.twice_as_fast(),
        guessed_bytes=step.guessed_bytes,
    )
