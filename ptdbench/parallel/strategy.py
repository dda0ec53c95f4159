"""The type of ``parallel=<preset>``: the degrees of parallelism and their options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel.apply import Setting, Transforms, apply
from ptdbench.parallel.batch import Layout, divides
from ptdbench.parallel.compilation import Compile, start_afresh
from ptdbench.parallel.convolutions import choose_convolutions
from ptdbench.parallel.dims import Degree, Dims, derive, divisors
from ptdbench.parallel.engine import Accumulating, Engine, MakeOptimizer
from ptdbench.parallel.footprint import Footprint, footprints
from ptdbench.parallel.pipeline import schedules
from ptdbench.parallel.pipeline.engine import pipelined
from ptdbench.parallel.precision import Name
from ptdbench.parallel.replicate import Replication
from ptdbench.parallel.shard import Offload, Sharding, shared_between_layers
from ptdbench.problems import Problem, at_least, require, try_these

DEGREES = ("replicate", "shard", "context", "tensor", "pipeline")

#: The options that have an effect only if a degree is not 1, and the presets where it is not.
_OPTIONS_OF = {
    "replicate": (
        "bucket_mb", "gradient_as_bucket_view", "static_graph", "optimizer", "powersgd_rank", "powersgd_start"
    ),
    "shard": ("reshard_after_forward", "reshard_between_microbatches", "prefetch"),
    "pipeline": ("schedule", "microbatches"),
}  # fmt: skip
_NO_EFFECT = "has no effect under these degrees of parallelism"
_PRESETS = {"replicate": "parallel=ddp,pdp", "shard": "parallel=fsdp,hsdp", "pipeline": "parallel=pdp"}


@dataclass(frozen=True)
class Strategy:
    """Lays out a model over the ranks.

    Attributes:
        replicate: Copies of the model, each with its share of the batch. ``auto``, here and below: derived from the
            number of ranks, see :func:`ptdbench.parallel.dims.derive`.
        shard: Ranks that share the weights of one copy, and its share of the batch.
        context: Ranks that share a sequence; 1.
        tensor: Ranks that share each matrix product; 1.
        pipeline: Stages that a copy is split into.
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
    optimizer: Literal["replicated", "zero1"] = "replicated"
    powersgd_rank: int = 1
    powersgd_start: int = 2
    reshard_after_forward: bool | int = True
    reshard_between_microbatches: bool | Literal["auto"] = "auto"
    prefetch: int = 1
    gradients: Literal["auto", "fp32", "bf16", "fp16", "powersgd"] = "auto"
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        given = {name: degree for name, degree in self._degrees().items() if degree != "auto"}
        require(
            *at_least(1, **given, prefetch=self.prefetch, powersgd_rank=self.powersgd_rank),
            *at_least(2, powersgd_start=self.powersgd_start),
            *(Problem(name, degree, "is not available yet; it must be 1") for name in ("context", "tensor")
              if (degree := getattr(self, name)) not in (1, 0)),
            None if self.bucket_mb == "auto" or self.bucket_mb > 0 else
            Problem("bucket_mb", self.bucket_mb, "must be greater than 0 (MiB)", try_these(["auto", 25])),
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
        require(self._static_graph(found), self._subgroup(dims))
        return found

    def check(self, model: Model, layout: Layout) -> None:
        """Raise ConfigError for a model that cannot be laid out this way."""
        dims = layout.dims
        if self._applies("pipeline", dims):
            require(_cannot_be_cut(model, dims, self.pipeline))
        if self._applies("shard", dims) and (names := shared_between_layers(model)):
            rule = f"{names[0]} and {names[1]} are one weight, and fully_shard wants it in one layer"
            require(Problem("shard", self.shard, rule, try_these(["parallel=ddp"])))

    def check_compile(self, how: Compile, layout: Layout) -> None:
        """Raise ConfigError where the model cannot be compiled this way."""
        if how == "whole" and self._applies("shard", layout.dims):
            rule = "is one graph, and sharded weights are gathered between the graphs of the layers"
            require(Problem("compile", how, rule, try_these(["layers", "or parallel=ddp"])))

    def check_precision(self, precision: Name) -> None:
        """Raise ConfigError for a precision that does not go with the options."""
        if precision == "fp16" and self.gradients == "powersgd":
            rule = "is not for scaled losses: a step that overflows is skipped, and its infinite error would be kept"
            require(Problem("parallel.gradients", "powersgd", rule, try_these(["auto", "or precision=bf16"])))

    def check_offload(self, what: Offload, layout: Layout) -> None:
        """Raise ConfigError where nothing is sharded that could be kept in host memory."""
        if what == "optimizer_and_weights" and not self._applies("shard", layout.dims):
            rule = "is for sharded weights, and these degrees of parallelism shard none"
            require(Problem("offload", what, rule, f"try {_PRESETS['shard']}"))

    def footprints(self, model: Model, layout: Layout, make: MakeOptimizer, *, average: bool) -> list[Footprint]:
        """The training state of a rank of each pipeline stage; ``average``: whether a moving average is kept."""
        in_buckets = self._applies("replicate", layout.dims) and not self._applies("shard", layout.dims)
        copies = 2 if in_buckets and not self.gradient_as_bucket_view else 1
        copies += in_buckets and self.gradients == "powersgd"  # what has not been sent yet
        divided = in_buckets and self.optimizer == "zero1"
        return footprints(model, layout.dims, make, average=average, gradient_copies=copies, divided=divided)

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Lay the model out; called in every rank."""
        start_afresh(setting.compile)
        choose_convolutions(module_of(model), setting.device)
        transforms = self._transforms(setting)
        if self._applies("pipeline", setting.layout.dims):
            return pipelined(model, setting, transforms, schedules.SCHEDULES[self.schedule])
        part = apply(model, module_of(model), setting, transforms)
        return Accumulating(part, setting.layout.micro_batch)

    def _transforms(self, setting: Setting) -> Transforms:
        layout, dims = setting.layout, setting.layout.dims
        gradients = "fp32" if self.gradients == "auto" else self.gradients
        if self._applies("shard", dims):
            after, between = self.reshard_after_forward, self.reshard_between_microbatches
            assert gradients != "powersgd"  # refused
            sharding = Sharding(
                reshard_after_forward=after,
                reshard_between_microbatches=bool(after) if between == "auto" else between,
                precision=setting.precision,
                reduce_dtype=gradients,
                prefetch=self.prefetch,
                offload=setting.offload != "none",
            )
            return Transforms(sharding=sharding, sync_batchnorm=self.sync_batchnorm)
        if not self._applies("replicate", dims):
            return Transforms()
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
        return Transforms(replication=replication, sync_batchnorm=self.sync_batchnorm)

    def _degrees(self) -> dict[str, Degree]:
        return {name: getattr(self, name) for name in DEGREES}

    def _derived(self) -> list[str]:
        """The derived degrees, in order."""
        return [name for name in ("pipeline", "shard", "replicate") if getattr(self, name) == "auto"]

    def _applies(self, degree: str, dims: Dims) -> bool:
        """Whether the transform of a degree is applied.

        A requested transform is applied on one rank too, so that its overhead can be measured.
        """
        return getattr(dims, degree) > 1 or (dims.world_size == 1 and self._derived()[:1] == [degree])

    def _without_effect(self) -> Iterator[Problem]:
        """Problems for options that are set although their degree is 1; with FSDP, DDP's have no effect."""
        defaults = {field.name: field.default for field in fields(self)}
        for degree, options in _OPTIONS_OF.items():
            if getattr(self, degree) == 1 or (degree == "replicate" and self.shard != 1):
                for option in options:
                    if getattr(self, option) != defaults[option]:
                        yield Problem(option, getattr(self, option), _NO_EFFECT, f"it belongs to {_PRESETS[degree]}")
        if self.replicate == self.shard == 1 and self.gradients != "auto":
            remedy = f"it belongs to {_PRESETS['replicate']},{_PRESETS['shard'].partition('=')[2]}"
            yield Problem("gradients", self.gradients, _NO_EFFECT, remedy)
        if self.pipeline != 1 and self.reshard_between_microbatches != "auto":
            rule = "has no effect under a pipeline, whose schedule keeps the weights of a stage between micro-batches"
            yield Problem("reshard_between_microbatches", self.reshard_between_microbatches, rule, try_these(["auto"]))
        if self.shard != 1 and self.gradients == "powersgd":
            rule = "is made of whole gradients, and each rank gets a shard of their sum here"
            yield Problem("gradients", "powersgd", rule, try_these(["auto", "bf16", "or parallel=ddp"]))
        if self.shard == 1 != self.replicate and self.gradients != "powersgd":
            for option in ("powersgd_rank", "powersgd_start"):
                if getattr(self, option) != defaults[option]:
                    rule = "has no effect without parallel.gradients=powersgd"
                    yield Problem(option, getattr(self, option), rule, "omit it")
        if self.pipeline != 1 and not isinstance(self.reshard_after_forward, bool):
            rule = "makes its groups of ranks with all others, and each stage of a pipeline is laid out on its own"
            yield Problem("reshard_after_forward", self.reshard_after_forward, rule, try_these(["true", "false"]))

    def _static_graph(self, layout: Layout) -> Problem | None:
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
