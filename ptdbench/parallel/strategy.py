"""The type of ``parallel=<preset>``: the degrees of parallelism and their options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel import context, tensor
from ptdbench.parallel.apply import Setting, Transforms, apply
from ptdbench.parallel.batch import Layout, divides
from ptdbench.parallel.compilation import Compile, start_afresh
from ptdbench.parallel.convolutions import choose_convolutions
from ptdbench.parallel.dims import DERIVED, Degree, Dims, derive, divisors
from ptdbench.parallel.engine import Accumulating, Engine, MakeOptimizer
from ptdbench.parallel.footprint import Footprint, footprints
from ptdbench.parallel.pipeline import schedules
from ptdbench.parallel.pipeline.engine import pipelined
from ptdbench.parallel.replicate import Replication
from ptdbench.parallel.shard import Sharding, shared_between_layers
from ptdbench.problems import Problem, at_least, require, try_these

DEGREES = ("replicate", "shard", "context", "tensor", "pipeline")

#: The options that have an effect only if a degree is not 1, and the presets where it is not.
_OPTIONS_OF = {
    "replicate": ("bucket_mb", "gradient_as_bucket_view", "static_graph"),
    "shard": ("reshard_after_forward", "reshard_between_microbatches"),
    "tensor": ("sequence",),
    "pipeline": ("schedule", "microbatches"),
}
_NO_EFFECT = "has no effect under these degrees of parallelism"
_PRESETS = {
    "replicate": "parallel=ddp,pdp",
    "shard": "parallel=fsdp,hsdp",
    "tensor": "parallel=tp,3d",
    "pipeline": "parallel=pdp",
}


@dataclass(frozen=True)
class Strategy:
    """Lays out a model over the ranks.

    Attributes:
        replicate: Copies of the model, each with its share of the batch. ``auto``, here and below: derived from the
            number of ranks, see :func:`ptdbench.parallel.dims.derive`.
        shard: Ranks that share the weights of one copy, and its share of the batch.
        context: Ranks that share each sequence: each computes on some of its positions.
        tensor: Ranks that share each matrix product.
        pipeline: Stages that a copy is split into.
        bucket_mb: Size of DDP's all-reduce buckets in MiB: smaller ones start earlier, larger ones use the links
            better. ``auto``: a twentieth of the gradients, at least 25 and at most 100.
        gradient_as_bucket_view: Let ``.grad`` point into DDP's buckets, which saves one copy of all gradients.
        static_graph: Tell DDP that every step uses the same parameters in the same order. ``auto``: where it is sound,
            that is without accumulation (with it torch fails an internal assertion) and without a pipeline (under 1F1B
            it silently gives wrong gradients).
        reshard_after_forward: Free a layer's gathered weights after its forward pass and gather them again for the
            backward pass (ZeRO-3); false keeps them in between (ZeRO-2): more memory, less traffic.
        reshard_between_microbatches: Free all gathered weights after the backward pass of each micro-batch; false keeps
            them until the last one: each is gathered once a micro-batch less, and the whole model is in memory then.
            ``auto``: as ``reshard_after_forward``, without which the whole model is in memory anyway.
        reduce_dtype: Dtype in which gradients are reduced; ``auto``: fp32, even if the arithmetic is narrower.
        context_method: How these see all positions in attention: ``ulysses``: they exchange positions for heads.
        sequence: Let the ranks that share each product share the positions of a sequence between them: norms and
            residuals are then computed once, and an all-reduce becomes a reduce-scatter and an all-gather.
        schedule: ``gpipe``: all forward passes, then all backward passes. ``1f1b``: alternating as early as possible,
            which holds at most ``pipeline`` micro-batches in memory.
        microbatches: Micro-batches of one pass of the schedule; ``auto``: from ``train.micro_batch`` if that is set,
            else at least two per stage.
        sync_batchnorm: Normalize over the whole global batch instead of over each rank's share.

    Raises:
        ConfigError: With every invalid option.
    """

    replicate: Degree = 1
    shard: Degree = 1
    context: Degree = 1
    tensor: Degree = 1
    pipeline: Degree = 1
    bucket_mb: float | Literal["auto"] = "auto"
    gradient_as_bucket_view: bool = True
    static_graph: bool | Literal["auto"] = "auto"
    reshard_after_forward: bool = True
    reshard_between_microbatches: bool | Literal["auto"] = "auto"
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    context_method: Literal["ulysses", "ring"] = "ulysses"
    sequence: bool = False
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        given = {name: degree for name, degree in self._degrees().items() if degree != "auto"}
        require(
            *at_least(1, **given),
            None if self.bucket_mb == "auto" or self.bucket_mb > 0 else
            Problem("bucket_mb", self.bucket_mb, "must be greater than 0 (MiB)", try_these(["auto", 25])),
            self._ring(),
            *self._without_effect(),
        )  # fmt: skip

    def ranks(self, available: int) -> int:
        """The number of ranks if the config does not set it: as many of the available devices as fit."""
        fixed = Dims(**{name: degree for name, degree in self._degrees().items() if degree != "auto"}).world_size
        return max(available // fixed, 1) * fixed if self._derived() else fixed

    def dims(self, world_size: int) -> Dims:
        """The degrees on so many ranks.

        Raises:
            ConfigError: They do not multiply to the world size.
        """
        return derive(world_size, self._degrees())

    def layout(self, dims: Dims, global_batch: int, micro_batch: int | Literal["auto"]) -> Layout:
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
            found = self._pipeline_layout(dims, global_batch, share, micro_batch)
            require(self._too_few_microbatches(found, micro_batch))
        else:
            size = share if micro_batch == "auto" else micro_batch
            found = Layout(dims, global_batch, size, accumulation=share // size)
        require(self._static_graph(found))
        return found

    def check(self, model: Model, layout: Layout) -> None:
        """Raise ConfigError for a model that cannot be laid out this way."""
        dims = layout.dims
        if self._applies("pipeline", dims):
            require(_cannot_be_cut(model, dims, self.pipeline))
        if self._applies("tensor", dims):
            require(*tensor.problems(model, dims.tensor, dims.context, sequence=self.sequence))
        if self._applies("context", dims):
            require(*context.problems(model, dims.context, dims.tensor))
        if self._is_sharded(dims) and (names := shared_between_layers(model)):
            rule = f"{names[0]} and {names[1]} are one weight, and fully_shard wants it in one layer"
            require(Problem("shard", self.shard, rule, try_these(["parallel=ddp"])))

    def check_compile(self, how: Compile, layout: Layout) -> None:
        """Raise ConfigError where the model cannot be compiled this way."""
        if how == "whole" and self._is_sharded(layout.dims):
            rule = "is one graph, and sharded weights are gathered between the graphs of the layers"
            require(Problem("compile", how, rule, try_these(["layers", "or parallel=ddp"])))

    def footprints(self, model: Model, layout: Layout, make: MakeOptimizer, *, average: bool) -> list[Footprint]:
        """The training state of a rank of each pipeline stage; ``average``: whether a moving average is kept."""
        in_buckets = (self._applies("replicate", layout.dims) or layout.dims.context > 1) and not self._is_sharded(
            layout.dims
        )
        copies = 2 if in_buckets and not self.gradient_as_bucket_view else 1
        shards = layout.dims.shard * layout.dims.context if self._is_sharded(layout.dims) else 1
        return footprints(model, layout.dims, make, shards=shards, average=average, gradient_copies=copies)

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Lay the model out; called in every rank."""
        start_afresh(setting.compile)
        choose_convolutions(module_of(model), setting.device)
        transforms = self._transforms(setting)
        engine: Engine
        if self._applies("pipeline", setting.layout.dims):
            engine = pipelined(model, setting, transforms, schedules.SCHEDULES[self.schedule])
        else:
            part = apply(model, module_of(model), setting, transforms)
            engine = Accumulating(part, setting.layout.micro_batch, owns_loss=setting.owns_loss)
        return context.Sliced(engine, setting.mesh.context) if setting.mesh.context else engine

    def _transforms(self, setting: Setting) -> Transforms:
        layout, dims = setting.layout, setting.layout.dims
        reduce_dtype = "fp32" if self.reduce_dtype == "auto" else self.reduce_dtype
        if self._is_sharded(dims):
            after = self.reshard_after_forward and dims.shard * dims.context > 1
            between = self.reshard_between_microbatches
            sharding = Sharding(after, after if between == "auto" else between, setting.precision, reduce_dtype)
            return Transforms(sharding=sharding, sync_batchnorm=self.sync_batchnorm, sequence=self.sequence)
        if not self._applies("replicate", dims) and dims.context == 1:
            return Transforms(sequence=self.sequence)
        sound = layout.accumulation == 1 and not self._applies("pipeline", dims)
        static_graph = sound if self.static_graph == "auto" else self.static_graph
        replication = Replication(self.bucket_mb, self.gradient_as_bucket_view, static_graph, reduce_dtype)
        return Transforms(replication=replication, sync_batchnorm=self.sync_batchnorm)

    def _degrees(self) -> dict[str, Degree]:
        return {name: getattr(self, name) for name in DEGREES}

    def _derived(self) -> list[str]:
        """The derived degrees, in order."""
        return [name for name in DERIVED if getattr(self, name) == "auto"]

    def _is_sharded(self, dims: Dims) -> bool:
        """Whether FSDP2 keeps the shards, or the copies: DDP knows no DTensors, which tensor parallelism makes."""
        return self._applies("shard", dims) or (dims.tensor > 1 and dims.replicate * dims.context > 1)

    def _applies(self, degree: str, dims: Dims) -> bool:
        """Whether the transform of a degree is applied.

        A requested transform is applied on one rank too, so that its overhead can be measured.
        """
        return getattr(dims, degree) > 1 or (dims.world_size == 1 and self._derived()[:1] == [degree])

    def _without_effect(self) -> Iterator[Problem]:
        """Problems for options that are set although their degree is 1; with FSDP, DDP's have no effect."""
        defaults = {field.name: field.default for field in fields(self)}
        for degree, options in _OPTIONS_OF.items():
            if getattr(self, degree) == 1 or (degree == "replicate" and not self.shard == self.tensor == 1):
                for option in options:
                    if getattr(self, option) != defaults[option]:
                        yield Problem(option, getattr(self, option), _NO_EFFECT, f"it belongs to {_PRESETS[degree]}")
        if self.replicate == self.shard == 1 and self.reduce_dtype != "auto":
            remedy = f"it belongs to {_PRESETS['replicate']},{_PRESETS['shard'].partition('=')[2]}"
            yield Problem("reduce_dtype", self.reduce_dtype, _NO_EFFECT, remedy)
        if self.pipeline != 1 and self.reshard_between_microbatches != "auto":
            rule = "has no effect under a pipeline, whose schedule keeps the weights of a stage between micro-batches"
            yield Problem("reshard_between_microbatches", self.reshard_between_microbatches, rule, try_these(["auto"]))

    def _ring(self) -> Problem | None:
        if self.context_method != "ring":
            return None
        rule = "needs attention kernels that torch has for GPUs alone, and is not available yet"
        return Problem("context_method", "ring", rule, try_these(["ulysses"]))

    def _static_graph(self, layout: Layout) -> Problem | None:
        if self.static_graph is not True:
            return None
        if self._applies("pipeline", layout.dims):
            return Problem("static_graph", True, "gives wrong gradients under a pipeline", try_these(["auto", "false"]))
        if layout.accumulation == 1:
            return None
        rule = f"is not sound with gradient accumulation, and there are {layout.accumulation} passes a step"
        return Problem("static_graph", True, rule, try_these(["auto", "false, or train.micro_batch=auto"]))

    def _pipeline_layout(self, dims: Dims, global_batch: int, share: int, micro_batch: int | Literal["auto"]) -> Layout:
        if micro_batch == "auto":
            count = schedules.busy(share, dims.pipeline) if self.microbatches == "auto" else self.microbatches
            require(divides("microbatches", count, share, "a replica's share of the batch"))
            return Layout(dims, global_batch, share // count, count)
        total = share // micro_batch
        count = total if self.microbatches == "auto" else self.microbatches
        require(divides("microbatches", count, total, "the micro-batches of a replica's step"))
        return Layout(dims, global_batch, micro_batch, count, total // count)

    def _too_few_microbatches(self, layout: Layout, micro_batch: int | Literal["auto"]) -> Problem | None:
        if self.schedule != "1f1b" or layout.microbatches >= layout.dims.pipeline:
            return None
        if self.microbatches != "auto":
            other = "auto"
        elif micro_batch != "auto":
            other = f"a smaller train.micro_batch than {micro_batch}"
        else:
            other = f"a train.global_batch of at least {layout.dims.world_size}"
        rule = f"must be at least the number of stages, {layout.dims.pipeline}, under 1f1b"
        return Problem("microbatches", layout.microbatches, rule, try_these([other, "or parallel.schedule=gpipe"]))


def _cannot_be_cut(model: Model, dims: Dims, wanted: Degree) -> Problem | None:
    """A problem if the model is not a chain of parts, or has fewer layers than stages."""
    parts = model.parts()
    if parts is None:
        reason = getattr(model, "uncut", None) or "has no parts()"
        rule = f"the model {reason}, so it cannot be cut into stages"
        return Problem("pipeline", wanted, rule, try_these(["parallel=ddp", "parallel=fsdp"]))
    layers = min(len(parts), len(model.layers() or parts))
    if dims.pipeline <= layers:
        return None
    close = [size for size in divisors(dims.world_size) if 1 < size <= layers][-3:]
    remedy = try_these(close) or try_these(["another cluster.ranks_per_node, or parallel=ddp"])
    return Problem("pipeline", dims.pipeline, f"must not exceed the number of the model's layers, {layers}", remedy)
