"""Pipeline + DDP: each replica is cut into stages on different devices, and the stages are replicated by DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from ptdbench.models.protocol import FlopsUnknown, Model
from ptdbench.parallel.ddp import backwards_until_settled, bucket_problem
from ptdbench.parallel.engine import Engine, Setting, norm_of
from ptdbench.parallel.handover import receive, send
from ptdbench.parallel.layout import Layout, arrange, divisors
from ptdbench.parallel.partition import balance
from ptdbench.parallel.precision import autocast_forward
from ptdbench.parallel.stage import Stage
from ptdbench.problems import ConfigError, Problem, require, try_these

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class PDP:
    """Options of the pipeline.

    Attributes:
        pipeline_size: Stages; the remaining factor of the world size is data-parallel. ``auto``: the smallest
            number above 1 that divides the world size.
        schedule: ``gpipe``: all forward passes, then all backward passes. ``1f1b``: alternating as early as
            possible, which holds at most ``pipeline_size`` micro-batches in memory.
        microbatches: Micro-batches of one pass of the schedule; ``auto``: from ``train.micro_batch`` where that
            is set, else at least two a stage.
        bucket_mb: As for ddp.
    """

    pipeline_size: int | Literal["auto"] = "auto"
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    bucket_mb: float = 25

    def __post_init__(self) -> None:
        require(bucket_problem(self.bucket_mb))

    def ranks(self, available: int) -> int:
        """How many of the available devices a run takes where its config does not say."""
        return available

    def layout(self, world_size: int, global_batch: int, micro_batch: int | Literal["auto"]) -> Layout:
        """Stages first, replicas from what is left; raises ConfigError where the numbers do not divide."""
        stages = self.pipeline_size
        if stages == "auto":
            stages = divisors(world_size)[1] if world_size > 1 else 1
        if stages == 1 < world_size:
            rule = f"one stage on {world_size} ranks is plain data parallelism"
            sizes = try_these(divisors(world_size)[1:4])
            require(Problem("parallel.pipeline_size", 1, rule, f"{sizes}, or parallel=ddp"))
        found = arrange(world_size, global_batch, micro_batch, pipeline=stages, microbatches=self.microbatches)
        if self.schedule == "1f1b" and found.microbatches < found.pipeline:
            rule = f"must be at least the number of stages, {found.pipeline}, under 1f1b"
            if self.microbatches != "auto":
                other = "auto"
            elif micro_batch != "auto":
                other = f"a smaller train.micro_batch than {micro_batch}"
            else:
                other = f"a train.global_batch of at least {found.world_size}"
            remedy = f"try {other}, or parallel.schedule=gpipe"
            require(Problem("parallel.microbatches", found.microbatches, rule, remedy))
        return found

    def check(self, model: Model, where: Layout) -> None:
        """Raises ConfigError for a model that is no chain of parts, or has fewer layers than stages."""
        parts = model.parts()
        if parts is None:
            rule = "the model has no parts(), so it cannot be cut into stages"
            raise ConfigError([Problem("parallel", "pdp", rule, "try parallel=ddp, parallel=fsdp")])
        layers = len(model.layers() or parts)
        if where.pipeline > layers:
            rule = f"must not exceed the number of the model's layers, {layers}"
            close = [size for size in divisors(where.world_size) if 1 < size <= layers][-3:]
            remedy = try_these(close) or "try another cluster.ranks_per_node, or parallel=ddp"
            require(Problem("parallel.pipeline_size", where.pipeline, rule, remedy))

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Build this rank's stage and the schedule that drives it."""
        where = setting.layout
        group = (setting.mesh["pipeline"] if where.pipeline > 1 else setting.mesh["data"]).get_group()
        index = dist.get_rank(group)

        # Cut by cost: the head of a small model with a large vocabulary can outweigh several layers.
        parts = model.parts() or {}  # check() has refused a model without
        cuts = balance(_costs(model, parts), where.pipeline)
        names = list(parts)[cuts[index].start : cuts[index].stop]
        stage = Stage({name: parts[name] for name in names})
        setting.fill(model, stage)
        inside = set(stage.modules())
        setting.dress([layer for layer in model.layers() if layer in inside])
        # On the stage and not around the schedule, so that activations travel in the narrow format.
        autocast_forward(stage, setting.precision, setting.device.type)

        replica: nn.Module = stage
        if where.data > 1:
            # No static graph: under 1F1B it silently gives wrong gradients.
            replica = DistributedDataParallel(
                stage,
                device_ids=[setting.device] if setting.device.type == "cuda" else None,
                process_group=setting.mesh["data"].get_group(),
                bucket_cap_mb=self.bucket_mb,
                gradient_as_bucket_view=True,
            )
        driven = PipelineStage(replica, index, where.pipeline, setting.device, group=group)
        twins = _twins(model, stage, cuts, group)
        return Pipelined(stage, replica, driven, SCHEDULES[self.schedule], where, twins)


def _costs(model: Model, parts: Mapping[str, nn.Module]) -> list[float]:
    """What each part costs: its FLOPs where the model tells them by part, else its parameters."""
    try:
        flops = model.train_flops()
    except FlopsUnknown:
        flops = {}
    if parts.keys() <= flops.keys():
        return [flops[name] for name in parts]
    return [sum(weight.numel() for weight in part.parameters()) for part in parts.values()]


@dataclass(frozen=True)
class Twin:
    """A weight of this stage that stands in another stage as well (GPT: embedding and head are one matrix).

    Attributes:
        weight: This stage's copy.
        peer: Global rank of the process that holds the other copy, in the same replica.
        is_first: Whether this is the copy that counts where the weight may count once only.
    """

    weight: nn.Parameter
    peer: int
    is_first: bool


def _twins(model: Model, stage: Stage, cuts: list[range], group: dist.ProcessGroup) -> list[Twin]:
    names = list(model.parts() or {})
    owner = {names[number]: index for index, cut in enumerate(cuts) for number in cut}
    here = dict(stage.named_parameters())

    def holder(weight: str) -> int:
        return next(index for part, index in owner.items() if weight.startswith(f"{part}."))

    found = []
    for one, other in model.tied():
        for mine, theirs in ((one, other), (other, one)):
            if mine in here and holder(mine) != holder(theirs):
                found.append(Twin(here[mine], dist.get_global_rank(group, holder(theirs)), mine == one))
    return found


class Pipelined:
    """The engine of a pipeline: one stage, driven by a schedule.

    Args:
        stage: This rank's part of the model.
        replica: The stage under DDP where there are several replicas, else the stage itself.
        driven: The stage as the schedule sees it.
        schedule: The schedule's class.
        where: How the batch falls onto the ranks.
        twins: Weights whose gradient another stage holds the other half of.
    """

    def __init__(
        self,
        stage: Stage,
        replica: nn.Module,
        driven: PipelineStage,
        schedule: type[PipelineScheduleSingle],
        where: Layout,
        twins: list[Twin],
    ) -> None:
        self.module: nn.Module = stage
        self.rehearsals = 1  # the very first pass begins with a trial, which draws random numbers too
        if isinstance(replica, DistributedDataParallel):
            # DDP rebuilds its buckets in the last pass of a step, and moves into them what the passes before have
            # added up. Such gradients it divides by the number of replicas, others it multiplies by the inverse.
            self.rehearsals = backwards_until_settled(replica) + (where.accumulation > 1)
        self._replica = replica
        self._driven = driven
        self._schedule = schedule(driven, where.microbatches, loss_fn=self._share_of_loss, scale_grads=False)
        self._where = where
        self._twins = twins
        self._scale: Callable[[Tensor], Tensor] = lambda loss: loss
        self._shares: list[Tensor] = []

    def gradients(self, inputs: Tensor, targets: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradients`."""
        self._scale = scale
        total = torch.zeros((), device=inputs.device)
        size = self._where.micro_batch * self._where.microbatches
        pieces = list(zip(inputs.split(size), targets.split(size), strict=True))
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            self._shares.clear()
            self._pass(some_inputs, some_targets, last=number == len(pieces))
            # The very first pass begins with a trial on uninitialised memory that tells torch the shapes.
            total += sum(self._shares[-self._where.microbatches :])
        self._join_twins()
        return total

    def gradient_norm(self) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradient_norm`."""
        second = {twin.weight for twin in self._twins if not twin.is_first}
        square = norm_of(weight for weight in self.module.parameters() if weight not in second).square()
        dist.all_reduce(square, group=self._driven.group)
        return square.sqrt()

    @torch.no_grad()
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`; the stages hand on what each of them has computed.

        Not through the schedule, whose micro-batches must all have one size.
        """
        stage, group = self._driven, cast(dist.ProcessGroup, self._driven.group)
        if not stage.is_first:
            inputs = receive(group, stage.stage_index - 1, inputs.device)
        if stage.is_last:
            return self.module(inputs) if targets is None else self.module(inputs, targets).mean()
        send(self.module(inputs), group, stage.stage_index + 1)
        return None

    def _pass(self, inputs: Tensor, targets: Tensor, last: bool) -> None:
        """One pass of the schedule; in the last one DDP averages the gradients.

        torch arms DDP itself before the backward of a pass's last micro-batch. Each forward outside of no_sync()
        would arm it too, and then the first backward would reduce what is not yet complete.
        """
        arguments = (inputs,) if self._driven.is_first else ()
        options: dict[str, Any] = {"targets": targets} if self._driven.is_last else {}
        self._driven.submod = self._replica if last else self.module
        armed_late = self._replica.no_sync() if isinstance(self._replica, DistributedDataParallel) else nullcontext()
        with armed_late:
            self._schedule.step(*arguments, target=targets, **options)

    def _share_of_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """What a micro-batch adds to the loss of the step; the last stage has computed the mean already."""
        share = loss.sum() / (self._where.microbatches * self._where.accumulation)
        self._shares.append(share.detach())
        return self._scale(share)

    def _join_twins(self) -> None:
        """Add the two halves of a shared weight's gradient, so that both copies take the same step."""
        for twin in self._twins:
            mine = twin.weight.grad
            assert mine is not None
            theirs = torch.empty_like(mine)
            exchange = [
                dist.P2POp(dist.isend, mine.contiguous(), twin.peer, self._driven.group),
                dist.P2POp(dist.irecv, theirs, twin.peer, self._driven.group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine += theirs
