"""What a pipeline asks of its options, of the batch and of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from ptdbench.models.protocol import Model
from ptdbench.parallel.batch import BatchPlan, divides
from ptdbench.parallel.dims import Dims, divisors
from ptdbench.parallel.options import Options
from ptdbench.parallel.pipeline import schedules
from ptdbench.problems import ConfigError, Problem, require, try_these


def problems(how: Options) -> Iterator[Problem]:
    """What is wrong under any degrees: no such schedule, or not with so many stages, or not with this torch."""
    try:
        schedule = how.pipeline_schedule
    except ConfigError as error:
        yield from error.problems
        return
    wanted, allowed = how.stages_per_rank, schedule.stages
    if wanted not in ("auto", allowed):
        if allowed != "several":
            remedy = try_these(["auto", "or parallel.schedule=interleaved1f1b"])
            yield Problem("stages_per_rank", wanted, f"must be {allowed} under {how.schedule}", remedy)
        elif not isinstance(wanted, int) or wanted < 2:
            rule = f"must be a whole number of at least 2 under {how.schedule}"
            yield Problem("stages_per_rank", wanted, rule, try_these(["auto", "or parallel.schedule=1f1b"]))
    if not schedule.is_supported:
        rule = f"needs torch {schedules.SPLITS_SINCE} or newer, and this is {torch.__version__}"
        yield Problem("schedule", how.schedule, rule, try_these(["interleaved1f1b", "looped_bfs"]))


def divide(how: Options, dims: Dims, global_batch: int, share: int, micro_batch: int | Literal["auto"]) -> BatchPlan:
    """Divide a replica's ``share`` of the batch into passes of micro-batches.

    Raises:
        ConfigError: The schedule does not take as many as there are.
    """
    schedule, size, per_rank = how.pipeline_schedule, dims.pipeline, how.stages_on_rank
    total = share if micro_batch == "auto" else share // micro_batch
    whole = "a replica's share of the batch" if micro_batch == "auto" else "the micro-batches of a replica's step"
    automatic = schedule.busy if micro_batch == "auto" else schedule.most
    count = automatic(total, size, per_rank) if how.microbatches == "auto" else how.microbatches
    require(divides("microbatches", count, total, whole))
    accumulation = 1 if micro_batch == "auto" else total // count
    each = share // (count * accumulation)
    found = BatchPlan(dims, global_batch, each, count, accumulation)
    require(_wrong_number(how, found, micro_batch))
    return found


def _wrong_number(how: Options, plan: BatchPlan, micro_batch: int | Literal["auto"]) -> Problem | None:
    """A problem if the schedule cannot run so many micro-batches."""
    schedule, dims, count = how.pipeline_schedule, plan.dims, plan.microbatches
    if schedule.accepts(count, dims.pipeline, how.stages_on_rank):
        return None
    fewest = schedule.fewest(dims.pipeline, how.stages_on_rank)
    if count < fewest:
        rule = f"must be at least the number of stages, {fewest}, under {how.schedule}"
    else:
        parts = schedules.rounds(count, dims.pipeline)
        rule = f"must be a multiple of {parts} under {how.schedule}, which takes them in {parts} equal rounds"
    if how.microbatches != "auto":
        other = "auto"
    elif micro_batch != "auto":
        other = f"a smaller train.micro_batch than {micro_batch}"
    else:
        other = f"a train.global_batch of at least {dims.batch * fewest}"
    return Problem("microbatches", count, rule, try_these([other, "or parallel.schedule=gpipe"]))


def cannot_be_cut(how: Options, model: Model, dims: Dims) -> Problem | None:
    """A problem if the model is not a chain of parts, or has fewer layers than stages."""
    parts = model.parts()
    if parts is None:
        reason = getattr(model, "uncut", None) or "has no parts()"
        rule = f"the model {reason}, so it cannot be cut into stages"
        return Problem("pipeline", how.pipeline, rule, try_these(["parallel=ddp", "parallel=fsdp"]))
    layers, per_rank = min(len(parts), len(model.layers() or parts)), how.stages_on_rank
    if dims.pipeline * per_rank <= layers:
        return None
    rule = f"must not exceed the number of the model's layers, {layers}"
    if per_rank > 1:
        stages = dims.pipeline * per_rank
        rule = f"pipeline({dims.pipeline}) x stages_per_rank({per_rank}) = {stages} stages {rule}"
    close = [size for size in divisors(dims.world_size) if size > 1 and size * per_rank <= layers][-3:]
    single = ["parallel.schedule=1f1b"] if per_rank > 1 and dims.pipeline <= layers else []
    others = [f"or {other}" if close else other for other in single]
    remedy = try_these([*close, *others]) or try_these(["another cluster.ranks_per_node, or parallel=ddp"])
    return Problem("pipeline", dims.pipeline, rule, remedy)
