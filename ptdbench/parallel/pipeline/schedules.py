"""In which order the stages of a pipeline work on the micro-batches of one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ptdbench.parallel.dims import divisors

#: For one stage a rank.
SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def make(
    kind: type[PipelineScheduleSingle | PipelineScheduleMulti],
    stages: Sequence[PipelineStage],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """A schedule over this rank's stages that leaves the division of gradients to the loss.

    Args:
        kind: Its class; one for single stages takes one.
        stages: This rank's, in order.
        microbatches: Of one pass.
        loss: Of ``(outputs, targets)`` of a micro-batch, a scalar.
    """
    if issubclass(kind, PipelineScheduleSingle):
        (stage,) = stages
        return kind(stage, microbatches, loss_fn=loss, scale_grads=False)
    return kind(list(stages), microbatches, loss_fn=loss, scale_grads=False)


def busy(share: int, stages: int) -> int:
    """Micro-batches of a replica's share of the batch that keep the stages busy: two a stage where it allows them.

    Of ``m + p - 1`` slots a stage idles in ``p - 1`` (GPipe, Huang et al. 2019), so more micro-batches mean a smaller
    bubble, and smaller, less efficient matrix products.
    """
    allowed = divisors(share)
    return next((number for number in allowed if number >= 2 * stages), allowed[-1]) if stages > 1 else 1
