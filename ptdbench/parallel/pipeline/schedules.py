"""Pipeline schedules: the order in which the stages process the micro-batches of one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ptdbench.parallel.dims import divisors

#: Schedules for one stage per rank.
SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def make(
    kind: type[PipelineScheduleSingle | PipelineScheduleMulti],
    stages: Sequence[PipelineStage],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """Create a schedule over this rank's stages that does not scale gradients: the loss does.

    Args:
        kind: Its class.
        stages: This rank's, in order.
        microbatches: Micro-batches of one pass.
        loss: The loss of a micro-batch from ``(outputs, targets)``, a scalar.
    """
    if issubclass(kind, PipelineScheduleSingle):
        (stage,) = stages
        return kind(stage, microbatches, loss_fn=loss, scale_grads=False)
    return kind(list(stages), microbatches, loss_fn=loss, scale_grads=False)


def busy(share: int, stages: int) -> int:
    """Number of micro-batches of a replica's share that keep the stages busy: two per stage if it allows them.

    Of ``m + p - 1`` slots a stage idles in ``p - 1`` (GPipe, Huang et al. 2019), so more micro-batches mean a smaller
    bubble, and smaller, less efficient matrix products.
    """
    allowed = divisors(share)
    return next((number for number in allowed if number >= 2 * stages), allowed[-1]) if stages > 1 else 1
