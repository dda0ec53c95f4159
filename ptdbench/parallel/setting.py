"""What a layout needs besides its options: the ranks, the batch, and the formats."""

from dataclasses import dataclass, field

import torch

from ptdbench.kernels import Kernels
from ptdbench.parallel.activations import Activations, Keep
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.compile import Compile
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.options import Offload
from ptdbench.parallel.precision import Name


@dataclass(frozen=True)
class Setting:
    """The ranks, formats and options of laying out a model."""

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
