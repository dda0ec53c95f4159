"""What all code that lays out a model gets: the options of ``parallel``, and the setting of a run.

The options are described in ``conf/parallel_options.yaml``.
"""
# No postponed annotations: setup/signature.py evaluates those that Strategy inherits to check its options.

from dataclasses import dataclass, field
from typing import Literal

import torch

from ptdbench.kernels import Kernels
from ptdbench.parallel.activations import Activations, Keep
from ptdbench.parallel.compile import Compile
from ptdbench.parallel.dims import BatchPlan, Degrees, Dims, Size, auto_degrees
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.pipeline_schedules import SCHEDULES, PipelineSchedule
from ptdbench.parallel.precision import Name

#: How attention sees all positions: ranks exchange positions for heads, or gather all keys and values.
Method = Literal["ulysses", "ring"]

#: What is kept in host memory between its uses.
Offload = Literal["none", "optimizer_and_weights"]


@dataclass(frozen=True)
class Options(Degrees[Size]):
    """The requested degrees and their options, and what these imply for the degrees of a run."""

    bucket_mb: float | Literal["auto"] = "auto"
    static_graph: Literal["auto", False, "find_unused"] = "auto"
    optimizer: Literal["replicated", "zero1"] = "replicated"
    reshard_after_forward: bool | int = True
    reduce_scatter_each_microbatch: bool = False
    prefetch: int = 1
    gradients: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    context_method: Method = "ulysses"
    sequence: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int | Literal["auto"] = "auto"
    microbatches: int | Literal["auto"] = "auto"
    sync_batchnorm: bool = False

    def applies(self, degree: str, dims: Dims) -> bool:
        """Return whether the transform of a degree is applied; if requested, also on one rank, to measure its cost."""
        return getattr(dims, degree) > 1 or (dims.world_size == 1 and auto_degrees(self.degrees())[:1] == [degree])

    def shards(self, dims: Dims) -> bool:
        """Whether FSDP2 manages the weights; it also manages replicas of DTensors, which DDP does not support."""
        over_context = self.shard == "auto" and dims.context > 1  # all other ranks may be of other degrees
        over_tensor = dims.tensor > 1 and dims.context * dims.copies > 1
        return self.applies("shard", dims) or dims.expert > 1 or over_context or over_tensor

    def gathers_weights(self, dims: Dims) -> bool:
        """Whether FSDP shards the weights over several ranks, and gathers them."""
        return self.shards(dims) and dims.shards > 1

    def replicates(self, dims: Dims) -> bool:
        """Whether DDP averages the gradients of unsharded weights, including over ranks that share a sequence."""
        return not self.shards(dims) and (self.applies("replicate", dims) or dims.ways("samples", "positions") > 1)

    def autocasts(self, dims: Dims, kernels: Kernels, dtype: torch.dtype) -> bool:
        """Whether torch chooses the dtype of each operation, and so of each message."""
        return kernels == "torch" and dtype != torch.float32 and not self.shards(dims)

    def stand_ins(self, dims: Dims, *, scales: bool) -> list[str]:
        """Return what of ours is used with ``kernels=torch``; ``scales``: whether losses are scaled, as fp16 needs."""
        used = {
            f"attention across ranks ({self.context_method})": dims.context > 1,
            "the exchange of tokens between experts": dims.expert > 1,
            "zero1": self.replicates(dims) and self.optimizer == "zero1",
            # Averaged gradients overflow everywhere, and torch asks the ranks that share weights of one mesh; but not
            # other stages, nor both meshes that experts and other weights are split over.
            "loss scaling": scales and (dims.pipeline > 1 or dims.expert > 1),
        }
        return [name for name, is_used in used.items() if is_used]

    @property
    def sent(self) -> Literal["fp32", "bf16", "fp16"]:
        """The format in which gradients are sent to be averaged."""
        return "fp32" if self.gradients == "auto" else self.gradients

    def frees_after_forward(self, dims: Dims) -> bool | int:
        """Return ``reshard_after_forward`` if weights are sharded over several ranks, else ``False``."""
        return self.reshard_after_forward if self.gathers_weights(dims) else False

    def accumulates_whole(self, plan: BatchPlan) -> bool:
        """Whether gradients of sharded weights accumulate unsharded over the micro-batches of a step."""
        is_sharded = self.gathers_weights(plan.dims) and not self.applies("pipeline", plan.dims)
        return is_sharded and plan.accumulation > 1 and not self.reduce_scatter_each_microbatch

    def has_static_graph(self, plan: BatchPlan) -> bool:
        """Whether DDP assumes a static graph: where it is sound, unless ``static_graph`` says otherwise.

        With accumulation torch fails an internal assertion, and under 1F1B it silently computes wrong gradients.
        """
        return self.static_graph == "auto" and plan.accumulation == 1 and not self.applies("pipeline", plan.dims)

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """The pipeline schedule."""
        return SCHEDULES[self.schedule]

    @property
    def stages_on_rank(self) -> int:
        """Number of pipeline stages on a rank."""
        return self.pipeline_schedule.per_rank(self.stages_per_rank)

    def stage_ranks(self, dims: Dims) -> list[int]:
        """Return the rank in the pipeline of each stage; without a pipeline there is one."""
        return (
            self.pipeline_schedule.ranks(dims.pipeline, self.stages_on_rank) if self.applies("pipeline", dims) else [0]
        )

    def splits_backward(self, dims: Dims) -> bool:
        """Whether a pipeline computes gradients of weights and of inputs separately."""
        return self.applies("pipeline", dims) and self.pipeline_schedule.splits_backward


@dataclass(frozen=True)
class Setting:
    """What a layout needs besides its options: the ranks, the batch, and the formats."""

    mesh: Mesh  #: The mesh of ranks.
    layout: BatchPlan  #: How the batch is split over them.
    device: torch.device  #: This rank's device.
    precision: Name = "fp32"  #: Dtype of the arithmetic.
    kernels: Kernels = "fused"  #: Whose kernels compute, and by which recipe in a narrow format.
    compile: Compile = False  #: What is compiled, see :mod:`ptdbench.parallel.compile`.
    activations: Activations = field(default_factory=Keep)  #: What becomes of activations until the backward pass.
    seed: int = 0  #: Seed of the weights.
    positions: int = 1  #: Tokens per sample; 1 if samples have none.
    channels_last: bool = False  #: Whether images are channels-last in memory.
    offload: Offload = "none"  #: What is kept in host memory between its uses.
    virtual: bool = False  #: Whether the devices are virtual, so that nothing is computed.

    @property
    def owns_loss(self) -> bool:
        """Whether this rank is the first in its tensor-parallel group, whose ranks compute the same loss together."""
        return not (ranks := self.mesh["tp"]) or ranks.get_local_rank() == 0
