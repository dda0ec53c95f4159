"""The type of ``parallel=<preset>``: the degrees of parallelism and their options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel import context, ring, tensor
from ptdbench.parallel.activations import Activations, Selective
from ptdbench.parallel.apply import Setting, Transforms, apply
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.compilation import Compile, start_afresh
from ptdbench.parallel.context import Method
from ptdbench.parallel.convolutions import choose_convolutions
from ptdbench.parallel.dims import Degrees, Dims, Size, derive, divisors, waiting
from ptdbench.parallel.engine import Accumulating, Engine, MakeOptimizer
from ptdbench.parallel.footprint import Footprint, footprints
from ptdbench.parallel.pipeline.engine import pipelined
from ptdbench.parallel.pipeline.options import PipelineOptions
from ptdbench.parallel.pipeline.stage import cut, unrepeated
from ptdbench.parallel.precision import Name
from ptdbench.parallel.replicate import Replication
from ptdbench.parallel.shard import Offload, Sharding, shared_between_layers
from ptdbench.parallel.volume import Work, expected
from ptdbench.problems import Problem, at_least, require, try_these

_NO_EFFECT = "has no effect under these degrees of parallelism"


@dataclass(frozen=True)
class Strategy(Degrees[Size]):
    """Lays out a model over the ranks.

    Attributes:
        bucket_mb: Size of DDP's all-reduce buckets in MiB: smaller ones start earlier, larger ones use the links
            better. ``auto``: a twentieth of the gradients, at least 25 and at most 100.
        gradient_as_bucket_view: Let ``.grad`` point into DDP's buckets, which saves one copy of all gradients.
        static_graph: Tell DDP that every step uses the same parameters in the same order. ``auto``: where it is sound,
            that is without accumulation (with it torch fails an internal assertion) and without a pipeline (under 1F1B
            it silently gives wrong gradients).
        optimizer: ``replicated``: every replica has the optimizer's state of all weights. ``zero1``: replicas divide
            it among them, and each sends the weights that it has updated to the others.
        powersgd_rank: Columns of PowerSGD's matrices.
        powersgd_start: Steps before it begins, at least 2.
        reshard_after_forward: Free a layer's gathered weights after its forward pass and gather them again for the
            backward pass (ZeRO-3); false keeps them in between (ZeRO-2): more memory, less traffic. A number, smaller
            than ``shard`` and a divisor of it: they stay sharded over groups of so many ranks, and are gathered there.
        reshard_between_microbatches: Free all gathered weights after the backward pass of each micro-batch; false keeps
            them until the last one: each is gathered once a micro-batch less, and the whole model is in memory then.
            ``auto``: as ``reshard_after_forward``, without which the whole model is in memory anyway.
        prefetch: Layers whose weights are gathered ahead of the one that computes.
        gradients: What is sent to average gradients: a dtype (``auto``: fp32, even if the arithmetic is narrower), or
            ``powersgd``: products of two thin matrices, under DDP.
        context_method: How these see all positions in attention: ``ulysses``: they exchange positions for heads.
            ``ring``: they gather the keys and values of all positions, which needs no heads to divide.
        sequence: Let the ranks that share each product share the positions of a sequence between them: norms and
            residuals are then computed once, and an all-reduce becomes a reduce-scatter and an all-gather.
        schedule: The order of the micro-batches' passes, see :mod:`ptdbench.parallel.pipeline.schedules`.
        stages_per_rank: Stages on a rank; ``auto``: as few as the schedule allows, one or two.
        microbatches: Micro-batches of one pass of the schedule; ``auto``: from ``train.micro_batch`` if that is set,
            else at least two for each rank of the pipeline.
        sync_batchnorm: Normalize over the whole global batch instead of over each rank's share.

    Raises:
        ConfigError: With every invalid option.
    """

    bucket_mb: float | Literal["auto"] = "auto"
    gradient_as_bucket_view: bool = True
    static_graph: bool | Literal["auto"] = "auto"
    optimizer: Literal["replicated", "zero1"] = "replicated"
    powersgd_rank: int = 1
    powersgd_start: int = 2
    reshard_after_forward: bool | int = True
    reshard_between_microbatches: bool | Literal["auto"] = "auto"
    prefetch: int = 1
    gradients: Literal["auto", "fp32", "bf16", "fp16", "powersgd"] = "auto"
    context_method: Method = "ulysses"
    sequence: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int | Literal["auto"] = "auto"
    microbatches: int | Literal["auto"] = "auto"
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        given = {name: degree for name, degree in self.degrees().items() if degree != "auto"}
        require(
            *at_least(1, **given, prefetch=self.prefetch, powersgd_rank=self.powersgd_rank),
            *at_least(2, powersgd_start=self.powersgd_start),
            None if self.bucket_mb == "auto" or self.bucket_mb > 0 else
            Problem("bucket_mb", self.bucket_mb, "must be greater than 0 (MiB)", try_these(["auto", 25])),
            self._ring(),
            *(self.pipelining.problems() if self.pipeline != 1 else ()),
            *self._without_effect(),
        )  # fmt: skip

    def ranks(self, available: int) -> int:
        """The number of ranks if the config does not set it: as many of the available devices as fit."""
        fixed = Dims(**{name: degree for name, degree in self.degrees().items() if degree != "auto"}).world_size
        return max(available // fixed, 1) * fixed if waiting(self.degrees()) else fixed

    def dims(self, world_size: int) -> Dims:
        """The degrees on so many ranks.

        Raises:
            ConfigError: They do not multiply to the world size.
        """
        return derive(world_size, self.degrees())

    def layout(self, dims: Dims, global_batch: int, micro_batch: int | Literal["auto"]) -> BatchPlan:
        """Divide a global batch among the ranks.

        Args:
            dims: The result of :meth:`dims`.
            global_batch: Samples of one optimizer step; a multiple of the number of replicas.
            micro_batch: Samples of one forward and backward pass; divides a replica's share; ``auto``: no accumulation.

        Raises:
            ConfigError: An option does not fit the batch.
        """
        share = global_batch // dims.batch
        if self._applies("pipeline", dims):
            found = self.pipelining.layout(dims, global_batch, share, micro_batch)
        else:
            size = share if micro_batch == "auto" else micro_batch
            found = BatchPlan(dims, global_batch, size, accumulation=share // size)
        require(self._static_graph(found), self._subgroup(dims), self._resharded(found))
        return found

    def check(self, model: Model, layout: BatchPlan) -> None:
        """Raise ConfigError for a model that cannot be laid out this way."""
        dims = layout.dims
        if self._applies("pipeline", dims):
            require(self.pipelining.cannot_be_cut(model, dims, self.pipeline))
        if self._applies("tensor", dims):
            require(*tensor.problems(model, dims.tensor, dims.context, sequence=self.sequence))
        if self._applies("context", dims):
            require(*context.problems(model, dims.context, dims.tensor, self.context_method))
        if self._is_sharded(dims) and (names := shared_between_layers(model)):
            rule = f"{names[0]} and {names[1]} are one weight, and fully_shard wants it in one layer"
            require(Problem("shard", self.shard, rule, try_these(["parallel=ddp"])))

    def check_sample(self, inputs: Tensor, layout: BatchPlan) -> None:
        """Raise ConfigError for samples, ``[batch, length]``, that cannot be divided this way."""
        if self._applies("context", layout.dims) and inputs.dim() > 1:
            require(*context.undividable(inputs.shape[1], layout.dims.context, self.context_method))

    def check_compile(self, how: Compile, layout: BatchPlan) -> None:
        """Raise ConfigError where the model cannot be compiled this way."""
        if how == "whole" and self._applies("context", layout.dims) and self.context_method == "ring":
            rule = "is one graph, and ring attention is not compiled"
            require(Problem("compile", how, rule, try_these(["layers", "or parallel.context_method=ulysses"])))
        if how == "whole" and self._is_sharded(layout.dims):
            rule = "is one graph, and sharded weights are gathered between the graphs of the layers"
            require(Problem("compile", how, rule, try_these(["layers", "or parallel=ddp"])))
        if how and self._applies("pipeline", layout.dims) and self.pipelining.schedule.splits_backward:
            rule = f"makes one graph of the backward pass, which {self.schedule} splits"
            require(Problem("compile", how, rule, try_these(["false", "or parallel.schedule=interleaved1f1b"])))

    def check_activations(self, how: Activations, layout: BatchPlan) -> None:
        """Raise ConfigError where activations cannot be treated this way."""
        splits_backward = self._applies("pipeline", layout.dims) and self.pipelining.schedule.splits_backward
        if isinstance(how, Selective) and splits_backward:
            rule = f"has what it keeps for one backward pass, and {self.schedule} takes two"
            remedy = try_these(["recompute", "keep", "or parallel.schedule=interleaved1f1b"])
            require(Problem("activations", "selective", rule, remedy))

    def check_precision(self, precision: Name) -> None:
        """Raise ConfigError for a precision that does not go with the options."""
        if precision == "fp16" and self.gradients == "powersgd":
            rule = "is not for scaled losses: a step that overflows is skipped, and its infinite error would be kept"
            require(Problem("parallel.gradients", "powersgd", rule, try_these(["auto", "or precision=bf16"])))

    def check_offload(self, what: Offload, layout: BatchPlan) -> None:
        """Raise ConfigError where nothing is sharded that could be kept in host memory."""
        if what == "optimizer_and_weights" and not self._applies("shard", layout.dims):
            rule = "is for sharded weights, and these degrees of parallelism shard none"
            require(Problem("offload", what, rule, f"try {self.rows()['shard'].preset}"))

    def footprints(self, model: Model, layout: BatchPlan, make: MakeOptimizer, *, average: bool) -> list[Footprint]:
        """The training state of each rank of a pipeline; ``average``: whether a moving average is kept."""
        dims = layout.dims
        copied = self._applies("replicate", dims) or dims.context > 1
        in_buckets = copied and not self._is_sharded(dims)
        copies = 2 if in_buckets and not self.gradient_as_bucket_view else 1
        copies += in_buckets and self.gradients == "powersgd"  # what has not been sent yet
        return footprints(
            model,
            dims,
            make,
            stages=self._stage_ranks(dims),
            shards=dims.shard * dims.context if self._is_sharded(dims) else 1,
            average=average,
            gradient_copies=copies,
            owners=dims.replicate * dims.context if in_buckets and self.optimizer == "zero1" else 1,
        )

    def volume(
        self,
        model: Model,
        layout: BatchPlan,
        example: tuple[Tensor, Tensor],
        precision: Name,
        *,
        recomputes: bool,
        gathers: int = 0,
    ) -> dict[str, float | None]:
        """Bytes of each operation of communication in a step by formula; see :class:`ptdbench.parallel.volume.Work`."""
        transforms = self._transforms(layout, precision, offload=False)
        ranks = self._stage_ranks(layout.dims)
        return expected(Work(model, example, layout, transforms, ranks, precision, recomputes, gathers))

    def parts_of_stages(self, model: Model, layout: BatchPlan) -> list[list[str]]:
        """Of each stage of a pipeline the names of the parts that are no repeated layers, such as the head."""
        return unrepeated(model, cut(model, self._stage_ranks(layout.dims)))

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Lay the model out; called in every rank."""
        start_afresh(setting.compile)
        choose_convolutions(module_of(model), setting.device)
        transforms = self._transforms(setting.layout, setting.precision, offload=setting.offload != "none")
        engine: Engine
        if self._applies("pipeline", setting.layout.dims):
            engine = pipelined(model, setting, transforms, self.pipelining.schedule, self.pipelining.stages_on_rank)
        else:
            part = apply(model, module_of(model), setting, transforms)
            engine = Accumulating(part, setting.layout.micro_batch, owns_loss=setting.owns_loss)
        mesh = setting.mesh["context"]
        return context.Sliced(engine, mesh, self.context_method) if mesh else engine

    def _transforms(self, layout: BatchPlan, precision: Name, *, offload: bool) -> Transforms:
        dims = layout.dims
        gradients = "fp32" if self.gradients == "auto" else self.gradients
        if self._is_sharded(dims):
            after = self.reshard_after_forward if dims.shard * dims.context > 1 else False
            between = self.reshard_between_microbatches
            assert gradients != "powersgd"  # refused
            sharding = Sharding(
                reshard_after_forward=after,
                reshard_between_microbatches=bool(after) if between == "auto" else between,
                precision=precision,
                reduce_dtype=gradients,
                prefetch=self.prefetch,
                offload=offload,
            )
            return Transforms(
                sharding=sharding,
                sync_batchnorm=self.sync_batchnorm,
                sequence=self.sequence,
                context_method=self.context_method,
            )
        if not self._applies("replicate", dims) and dims.context == 1:
            return Transforms(sequence=self.sequence)
        sound = layout.accumulation == 1 and not self._applies("pipeline", dims)
        static_graph = sound if self.static_graph == "auto" else self.static_graph
        replication = Replication(
            bucket_mb=self.bucket_mb,
            as_bucket_view=self.gradient_as_bucket_view,
            static_graph=static_graph,
            gradients=gradients,
            powersgd_rank=self.powersgd_rank,
            powersgd_start=self.powersgd_start,
            divides_optimizer=self.optimizer == "zero1",
        )
        return Transforms(
            replication=replication, sync_batchnorm=self.sync_batchnorm, context_method=self.context_method
        )

    @cached_property
    def pipelining(self) -> PipelineOptions:
        """The options of a pipeline."""
        return PipelineOptions(self.schedule, self.stages_per_rank, self.microbatches)

    def _stage_ranks(self, dims: Dims) -> list[int]:
        """The rank in the pipeline of each stage; one without a pipeline."""
        return self.pipelining.stage_ranks(dims) if self._applies("pipeline", dims) else [0]

    def _is_sharded(self, dims: Dims) -> bool:
        """Whether FSDP2 keeps the shards, or the copies: DDP knows no DTensors, which tensor parallelism makes."""
        return self._applies("shard", dims) or (dims.tensor > 1 and dims.context * dims.replicate > 1)

    def _applies(self, degree: str, dims: Dims) -> bool:
        """Whether the transform of a degree is applied.

        A requested transform is applied on one rank too, so that its overhead can be measured.
        """
        return getattr(dims, degree) > 1 or (dims.world_size == 1 and waiting(self.degrees())[:1] == [degree])

    def _without_effect(self) -> Iterator[Problem]:
        """Problems for options that are set although their degree is 1.

        DDP averages the gradients also of ranks that share a sequence, and with FSDP its options have no effect.
        """
        defaults = {field.name: field.default for field in fields(self)}
        for degree, row in self.rows().items():
            is_one = getattr(self, degree) == 1 and (degree != "replicate" or self.context == 1)
            if is_one or (degree == "replicate" and not self.shard == self.tensor == 1):
                for option in row.options:
                    if getattr(self, option) != defaults[option]:
                        yield Problem(option, getattr(self, option), _NO_EFFECT, f"it belongs to {row.preset}")
        rows = self.rows()
        if self.replicate == self.shard == self.context == 1 and self.gradients != "auto":
            remedy = f"it belongs to {rows['replicate'].preset},{rows['shard'].preset.partition('=')[2]}"
            yield Problem("gradients", self.gradients, _NO_EFFECT, remedy)
        if self.pipeline != 1 and self.reshard_between_microbatches != "auto":
            rule = "has no effect under a pipeline, whose schedule keeps the weights of a stage between micro-batches"
            yield Problem("reshard_between_microbatches", self.reshard_between_microbatches, rule, try_these(["auto"]))
        if not self.shard == self.tensor == 1 and self.gradients == "powersgd":
            rule = "is made of whole gradients, and here are shards of them"
            yield Problem("gradients", "powersgd", rule, try_these(["auto", "bf16", "or parallel=ddp"]))
        if self.shard == 1 and not self.replicate == self.context == 1 and self.gradients != "powersgd":
            for option in ("powersgd_rank", "powersgd_start"):
                if getattr(self, option) != defaults[option]:
                    rule = "has no effect without parallel.gradients=powersgd"
                    yield Problem(option, getattr(self, option), rule, "omit it")
        if not self.pipeline == self.tensor == self.context == 1 and not isinstance(self.reshard_after_forward, bool):
            rule = "makes groups of ranks that only shard, without stages, tensor or context parallelism"
            yield Problem("reshard_after_forward", self.reshard_after_forward, rule, try_these(["true", "false"]))

    def _ring(self) -> Problem | None:
        if self.context_method != "ring" or not (lacks := ring.missing()):
            return None
        rule = f"needs {lacks}, which torch {torch.__version__} has not"
        return Problem("context_method", "ring", rule, try_these(["ulysses"]))

    def _static_graph(self, layout: BatchPlan) -> Problem | None:
        if self.static_graph is not True:
            return None
        if self._applies("pipeline", layout.dims):
            return Problem("static_graph", True, "gives wrong gradients under a pipeline", try_these(["auto", "false"]))
        if layout.accumulation == 1:
            return None
        rule = f"is not sound with gradient accumulation, and there are {layout.accumulation} passes a step"
        return Problem("static_graph", True, rule, try_these(["auto", "false, or train.micro_batch=auto"]))

    def _subgroup(self, dims: Dims) -> Problem | None:
        """A problem if weights are to be resharded to groups that are no part of the ranks that shard them."""
        size = self.reshard_after_forward
        fits = divisors(dims.shard)[1:-1]
        if isinstance(size, bool) or size in fits:
            return None
        rule = f"a number must divide shard({dims.shard}), and lie between 1 and it"
        return Problem("reshard_after_forward", size, rule, try_these(["true", "false", *fits]))

    def _resharded(self, layout: BatchPlan) -> Problem | None:
        """A problem if weights would be freed between the two halves of a backward pass."""
        splits = self._applies("pipeline", layout.dims) and self.pipelining.schedule.splits_backward
        if self.reshard_after_forward is False or not splits or not self._applies("shard", layout.dims):
            return None
        rule = (
            f"gives wrong gradients under {self.schedule}, which computes those of weights after other forward passes"
        )
        remedy = try_these(["false", "or parallel.schedule=interleaved1f1b"])
        return Problem("reshard_after_forward", self.reshard_after_forward, rule, remedy)
