"""The options of a pipeline: which schedule, with how many stages and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ptdbench.models.protocol import Model
from ptdbench.parallel.batch import BatchPlan, divides
from ptdbench.parallel.dims import Dims, Size, divisors
from ptdbench.parallel.pipeline import schedules
from ptdbench.parallel.pipeline.schedules import SCHEDULES, Schedule
from ptdbench.problems import ConfigError, Problem, nearest, require, try_these


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs; the options are those of :class:`ptdbench.parallel.strategy.Strategy`.

    Attributes:
        name: The name of a schedule.
        stages_per_rank: Stages on a rank.
        microbatches: Micro-batches of a pass.
    """

    name: str
    stages_per_rank: int | Literal["auto"]
    microbatches: int | Literal["auto"]

    @property
    def schedule(self) -> Schedule:
        """The schedule.

        Raises:
            ConfigError: There is none of this name.
        """
        if self.name in SCHEDULES:
            return SCHEDULES[self.name]
        rule = f"must be {', '.join(SCHEDULES)}"
        raise ConfigError([Problem("schedule", self.name, rule, try_these(nearest(self.name, SCHEDULES)))])

    @property
    def stages_on_rank(self) -> int:
        """Stages on a rank."""
        return self.schedule.per_rank(self.stages_per_rank)

    def stage_ranks(self, dims: Dims) -> list[int]:
        """The rank in the pipeline of each stage."""
        return self.schedule.ranks(dims.pipeline, self.stages_on_rank)

    def problems(self) -> Iterator[Problem]:
        """What is wrong under any degrees: no such schedule, or not with so many stages, or not with this torch."""
        try:
            schedule = self.schedule
        except ConfigError as error:
            yield from error.problems
            return
        wanted, allowed = self.stages_per_rank, schedule.stages
        if wanted not in ("auto", allowed):
            if allowed != "several":
                remedy = try_these(["auto", "or parallel.schedule=interleaved1f1b"])
                yield Problem("stages_per_rank", wanted, f"must be {allowed} under {self.name}", remedy)
            elif not isinstance(wanted, int) or wanted < 2:
                rule = f"must be a whole number of at least 2 under {self.name}"
                yield Problem("stages_per_rank", wanted, rule, try_these(["auto", "or parallel.schedule=1f1b"]))
        if not schedule.is_supported:
            rule = f"needs torch {schedules.SPLITS_SINCE} or newer, and this is {torch.__version__}"
            yield Problem("schedule", self.name, rule, try_these(["interleaved1f1b", "looped_bfs"]))

    def layout(self, dims: Dims, global_batch: int, share: int, micro_batch: int | Literal["auto"]) -> BatchPlan:
        """Divide a replica's ``share`` of the batch into passes of micro-batches.

        Raises:
            ConfigError: The schedule does not take as many as there are.
        """
        schedule, size, per_rank = self.schedule, dims.pipeline, self.stages_on_rank
        total = share if micro_batch == "auto" else share // micro_batch
        whole = "a replica's share of the batch" if micro_batch == "auto" else "the micro-batches of a replica's step"
        automatic = schedule.busy if micro_batch == "auto" else schedule.most
        count = automatic(total, size, per_rank) if self.microbatches == "auto" else self.microbatches
        require(divides("microbatches", count, total, whole))
        accumulation = 1 if micro_batch == "auto" else total // count
        each = share // (count * accumulation)
        found = BatchPlan(dims, global_batch, each, count, accumulation)
        require(self._wrong_number(found, micro_batch))
        return found

    def _wrong_number(self, layout: BatchPlan, micro_batch: int | Literal["auto"]) -> Problem | None:
        """A problem if the schedule cannot run so many micro-batches."""
        schedule, dims, count = self.schedule, layout.dims, layout.microbatches
        if schedule.accepts(count, dims.pipeline, self.stages_on_rank):
            return None
        fewest = schedule.fewest(dims.pipeline, self.stages_on_rank)
        if count < fewest:
            rule = f"must be at least the number of stages, {fewest}, under {self.name}"
        else:
            parts = schedules.rounds(count, dims.pipeline)
            rule = f"must be a multiple of {parts} under {self.name}, which takes them in {parts} equal rounds"
        if self.microbatches != "auto":
            other = "auto"
        elif micro_batch != "auto":
            other = f"a smaller train.micro_batch than {micro_batch}"
        else:
            other = f"a train.global_batch of at least {dims.batch * fewest}"
        return Problem("microbatches", count, rule, try_these([other, "or parallel.schedule=gpipe"]))

    def cannot_be_cut(self, model: Model, dims: Dims, degree: Size) -> Problem | None:
        """A problem if the model is not a chain of parts, or has fewer layers than stages.

        Args:
            model: The model.
            dims: The degrees.
            degree: The pipeline's, as it was given.
        """
        parts = model.parts()
        if parts is None:
            reason = getattr(model, "uncut", None) or "has no parts()"
            rule = f"the model {reason}, so it cannot be cut into stages"
            return Problem("pipeline", degree, rule, try_these(["parallel=ddp", "parallel=fsdp"]))
        layers, per_rank = min(len(parts), len(model.layers() or parts)), self.stages_on_rank
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
