"""Steps of other micro-batches than the one that was asked for, and steps that stand for longer ones."""

from __future__ import annotations

from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import divisors
from ptdbench.problems import ConfigError
from ptdbench.setup.training_spec import TrainingSpec

#: Passes of a step that are carried out: from the second one on gradients are accumulated, and none needs more.
_PASSES = 2

#: Micro-batches of a run whose global batch is not given.
_POWERS = [2**power for power in range(13)]


def layouts(training: TrainingSpec, is_free: bool = False) -> dict[int, BatchPlan]:
    """The layouts of a run by their micro-batches, in ascending order.

    Args:
        training: The run.
        is_free: Whether the global batch follows from the micro-batch, so that a replica has one pass, of a pipeline
            with as many micro-batches as it needs.

    Raises:
        ConfigError: There is none; why not of the smallest.
    """
    strategy, dims, batch = training.strategy, training.layout.dims, training.layout.global_batch
    staged = strategy.applies("pipeline", dims)
    fewest = strategy.pipeline_schedule.fewest(dims.pipeline, strategy.stages_on_rank) if staged else 1
    sizes = {size: dims.batch * size * fewest for size in _POWERS} if is_free else {}
    found = {}
    first: ConfigError | None = None
    for size, total in (sizes or dict.fromkeys(divisors(training.layout.replica_batch), batch)).items():
        try:
            found[size] = strategy.layout(dims, total, size)
        except ConfigError as error:
            first = first or error
    if not found and first:
        raise first.under("parallel")
    return found


def stand_in(training: TrainingSpec, layout: BatchPlan) -> BatchPlan:
    """A step with no more passes than it takes to see the peak of this one."""
    if layout.accumulation <= _PASSES:
        return layout
    batch = layout.global_batch // layout.accumulation * _PASSES
    shorter = training.strategy.layout(layout.dims, batch, layout.micro_batch)
    return shorter if shorter.microbatches == layout.microbatches else layout
