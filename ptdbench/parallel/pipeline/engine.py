"""The engine of a pipeline: stages on different ranks, driven by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ptdbench.models.protocol import Model
from ptdbench.parallel.apply import Setting, Transforms, apply
from ptdbench.parallel.batch import Layout
from ptdbench.parallel.engine import Engine, Part, Scale, norm_of
from ptdbench.parallel.pipeline import schedules, shared
from ptdbench.parallel.pipeline.handover import receive, send
from ptdbench.parallel.pipeline.stage import Cut, Stage, cut


def pipelined(
    model: Model,
    setting: Setting,
    transforms: Transforms,
    kind: type[PipelineScheduleSingle | PipelineScheduleMulti],
    stages_per_rank: int = 1,
) -> Engine:
    """Build this rank's stages, each laid out over its replicas or shards, and their schedule.

    Args:
        model: A chain of parts.
        setting: The ranks, formats and options.
        transforms: The transforms of each stage.
        kind: The schedule's class.
        stages_per_rank: Number of stages on a rank; rank ``r`` of ``p`` has the stages ``r``, ``r + p``, ...
    """
    size = setting.layout.dims.pipeline
    mesh = setting.mesh.pipeline or setting.mesh.batch  # of one rank for a pipeline of one stage
    where = cut(model, [stage % size for stage in range(size * stages_per_rank)])
    held = _stages(model, where, dist.get_rank(mesh.get_group()))
    tied = model.tied()  # before sharding replaces the weights, which a model may compare
    parts = {number: apply(model, stage, setting, transforms) for number, stage in held.items()}
    return Pipelined(model, tied, where, parts, kind, setting.layout, mesh.get_group(), setting.device)


def _stages(model: Model, where: Cut, rank: int) -> dict[int, Stage]:
    parts, last = model.parts() or {}, len(where.stages) - 1
    return {
        number: Stage({name: parts[name] for name in where.stages[number]}, is_last=number == last)
        for number in where.of(rank)
    }


class Pipelined(Engine):
    """The engine of a pipeline.

    Args:
        model: The whole model.
        tied: Pairs of its weights that are one, see :meth:`ptdbench.models.protocol.Model.tied`.
        where: The model's stages and their ranks.
        parts: This rank's stages by number, laid out.
        kind: The schedule's class.
        layout: How the batch is divided among the ranks.
        group: The ranks of the pipeline.
        device: This rank's device.
    """

    def __init__(
        self,
        model: Model,
        tied: Sequence[tuple[str, str]],
        where: Cut,
        parts: dict[int, Part],
        kind: type[PipelineScheduleSingle | PipelineScheduleMulti],
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        last = len(where.stages) - 1
        self.module: nn.Module = next(iter(parts.values())).module
        if len(parts) > 1:  # the same parts in one module
            named = model.parts() or {}
            self.module = Stage({name: named[name] for number in parts for name in where.stages[number]})
        self.parts = list(parts.values())
        self.owns_loss = last in parts
        settles = max(part.settles_after for part in parts.values())
        # The very first pass begins with a shape inference pass, which also draws random numbers. DDP rebuilds its
        # buckets in the last pass of a step, and moves the gradients accumulated before into them. It divides those by
        # the number of replicas, and multiplies others by the inverse.
        self.rehearsals = settles + (layout.accumulation > 1) if settles else 1
        self._where = where
        self._parts = parts
        self._layout = layout
        self._group = group
        self._stages = {
            number: PipelineStage(part.runner, number, len(where.stages), device, group=group)
            for number, part in parts.items()
        }
        self._schedule = schedules.make(kind, list(self._stages.values()), layout.microbatches, self._share_of_loss)
        self._shared = shared.find(tied, self.module, where, group)
        self._scale: Scale = lambda loss: loss
        self._shares: list[Tensor] = []

    def gradients(self, inputs: Tensor, targets: Tensor, scale: Scale) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradients`."""
        self._scale = scale
        total = torch.zeros((), device=inputs.device)
        size = self._layout.micro_batch * self._layout.microbatches
        pieces = list(zip(inputs.split(size), targets.split(size), strict=True))
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            self._shares.clear()
            self._pass(some_inputs, some_targets, last=number == len(pieces))
            # The very first pass begins with torch's shape inference on uninitialized memory.
            total += sum(self._shares[-self._layout.microbatches :])
        shared.add_up(self._shared, self._group)
        return total

    def gradient_norm(self) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradient_norm`; a shared weight counts once."""
        second = {one.weight for one in self._shared if not one.is_first}
        square = norm_of(weight for weight in self.module.parameters() if weight not in second).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @torch.no_grad()
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`; each stage sends its outputs to the next.

        Not through the schedule, whose micro-batches must all have one size.
        """
        ranks, last = self._where.ranks, len(self._where.ranks) - 1
        found = None
        for number, part in self._parts.items():
            arrived = receive(self._group, ranks[number - 1], inputs.device) if number else inputs
            try:
                found = part.module(arrived) if targets is None else part.module(arrived, targets)
            finally:
                part.release()
            if number < last:
                send(found, self._group, ranks[number + 1])
        if not self.owns_loss or found is None:
            return None
        return found if targets is None else found.mean()

    def _pass(self, inputs: Tensor, targets: Tensor, last: bool) -> None:
        """Run one pass of the schedule; in the last one DDP averages the gradients.

        torch itself arms DDP before the backward of a pass's last micro-batch. Each forward outside no_sync() would
        arm it too, and the first backward would then reduce incomplete gradients.
        """
        arguments = (inputs,) if 0 in self._parts else ()
        options: dict[str, Any] = {"targets": targets} if self.owns_loss else {}
        with ExitStack() as armed_late:
            for number, part in self._parts.items():
                self._stages[number].submod = part.runner if last else part.module
                if part.runner is not part.module:
                    armed_late.enter_context(part.deferred())
            self._schedule.step(*arguments, target=targets, **options)

    def _share_of_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """A micro-batch's contribution to the loss of the step; the last stage has already computed the mean."""
        share = loss.sum() / (self._layout.microbatches * self._layout.accumulation)
        self._shares.append(share.detach())
        return self._scale(share)
