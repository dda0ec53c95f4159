"""Replacing the losses and batch norms of a model by ours."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptdbench.kernels.batchnorm import has_forward, synchronize_batchnorm
from ptdbench.kernels.choice import Kernels
from ptdbench.kernels.linear_cross_entropy import LinearCrossEntropy, master_of
from ptdbench.models.decoder import Head
from ptdbench.problems import Problem, require


class FusedHead(Head):
    """A head whose projection and loss are one operation, without the whole logits."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` to logits ``[batch, length, vocabulary]``, or the mean loss in fp32."""
        if targets is None:
            return super().forward(x)
        # If a narrow copy replaces the weight, the weight itself gets the gradient, summed in fp32.
        loss: Tensor = self.cross_entropy(self.norm(x), self.projection.weight, targets, master_of(self.projection))
        return loss


def enable(module: nn.Module, kernels: Kernels, synchronized: dist.ProcessGroup | None, device: torch.device) -> None:
    """Replace the losses of language models' heads, and the batch norms that normalize over the ranks of a group.

    Call it before any transform. ``synchronized``: the group; ``None``: each rank normalizes its own samples.
    """
    if synchronized:
        for kind in {type(part) for part in module.modules() if isinstance(part, _BatchNorm)}:
            if kernels == "torch" and has_forward(kind):
                rule = f"with kernels=torch is nn.SyncBatchNorm, which drops the forward of {kind.__name__}"
                require(Problem("parallel.sync_batchnorm", True, rule, "try kernels=fused"))
        synchronize_batchnorm(module, synchronized, device)
    if kernels == "torch":
        return
    for part in module.modules():
        if type(part) is Head:
            part.__class__ = FusedHead
            part.cross_entropy = LinearCrossEntropy()
