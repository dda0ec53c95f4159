"""Pipeline schedules: the order in which the stages process the micro-batches of one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ptdbench.parallel.dims import divisors

#: A schedule over the stages of a rank.
Running: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti

#: The first version of torch that splits the backward pass of every model. 2.11 stops at autograd functions in Python,
#: such as our cross entropy, and double-counts gradients that reach a weight by two paths; the others are untested.
SPLITS_SINCE = "2.15"


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch, and its requirements."""

    kind: type[Running]  #: Its class.
    stages: int | Literal["several"] = 1  #: Stages on a rank; ``several``: any number from 2 on.
    #: ``loop``: rank ``r`` of ``p`` has the stages ``r``, ``r + p``, ...; ``v``: the stages ``r`` and ``2p - 1 - r``,
    #: so that the first rank has the last stage.
    placement: Literal["loop", "v"] = "loop"
    #: How many micro-batches a pass needs. ``stages``: at least as many as stages. ``rounds``: a multiple of the number
    #: of rounds, ``max(1, microbatches // p)``.
    microbatches: Literal["any", "stages", "rounds"] = "any"
    splits_backward: bool = False  #: Whether gradients of weights and of inputs are computed separately.
    #: Idle time of the rank that idles longest, in units of ``(p - 1) / v`` times a rank's time for one of the three
    #: parts of a micro-batch: forward, gradient of inputs, gradient of weights; with as many micro-batches as the
    #: schedule is made for, see :meth:`bubble`. 3: gpipe and 1f1b (Huang et al. 2019;
    #: Narayanan et al. 2021, section 2.2), looped_bfs (Lamy-Poirier 2022, section 4.1). 1: zero bubble's ZB-H1 (Qi et
    #: al. 2023, table 2). 0: ZB-V (section 6). 2: DeepSeek's table of DualPipeV, where forward and backward passes do
    #: not overlap.
    bubble_units: int = 3

    @property
    def is_supported(self) -> bool:
        """Whether the installed torch has the schedule."""
        return not self.splits_backward or torch.__version__ >= SPLITS_SINCE

    def per_rank(self, requested: int | Literal["auto"]) -> int:
        """Return the number of stages on a rank; ``auto``: as few as the schedule allows."""
        if requested != "auto":
            return requested
        return 2 if self.stages == "several" else self.stages

    def ranks(self, size: int, per_rank: int) -> list[int]:
        """Return the rank of each stage, for ``size`` ranks with ``per_rank`` stages each."""
        once = list(range(size))
        return [*once, *reversed(once)] if self.placement == "v" else once * per_rank

    def fewest(self, size: int, per_rank: int) -> int:
        """Return the smallest number of micro-batches of a pass."""
        return size * per_rank if self.microbatches == "stages" else 1

    def accepts(self, microbatches: int, size: int, per_rank: int) -> bool:
        """Return whether a pass may have this number of micro-batches."""
        in_rounds = self.microbatches != "rounds" or microbatches % rounds(microbatches, size) == 0
        return in_rounds and microbatches >= self.fewest(size, per_rank)

    def bubble(self, size: int, per_rank: int, microbatches: int) -> float | None:
        """Return the idle fraction of a pass, if the three parts of a micro-batch take equally long in all stages.

        ``None`` if it is unknown: a split backward pass of too few micro-batches to fill the idle time.
        """
        if self.splits_backward and microbatches < (2 * size - 1 if self.placement == "v" else size):
            return None
        # With fewer micro-batches than ranks, a rank also waits between its stages, in both passes.
        between = 3 * (per_rank - 1) * max(0, size - microbatches)
        idle = (self.bubble_units * (size - 1) + between) / per_rank
        return idle / (3 * microbatches + idle)

    def busy(self, share: int, size: int, per_rank: int) -> int:
        """Return how many micro-batches keep the stages busy: two per rank if the replica's share and schedule allow.

        A stage idles in ``p - 1`` of ``m + p - 1`` slots (GPipe, Huang et al. 2019), so more micro-batches mean a
        smaller bubble, but also smaller, less efficient matrix products.
        """
        if size * per_rank == 1:
            return 1
        allowed = [number for number in divisors(share) if self.accepts(number, size, per_rank)] or divisors(share)
        return next((number for number in allowed if number >= 2 * size), allowed[-1])

    def most(self, share: int, size: int, per_rank: int) -> int:
        """Return the largest allowed number of micro-batches of a pass that divides the ``share`` of a step."""
        return max((number for number in divisors(share) if self.accepts(number, size, per_rank)), default=share)

    def make(
        self, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Running:
        """Create the schedule over this rank's stages, in order; it does not scale gradients, as ``loss`` does.

        ``loss`` maps a micro-batch's ``(outputs, targets)`` to a scalar.
        """
        if issubclass(self.kind, PipelineScheduleSingle):
            (stage,) = stages
            return self.kind(stage, microbatches, loss_fn=loss, scale_grads=False)
        return self.kind(list(stages), microbatches, loss_fn=loss, scale_grads=False)


def rounds(microbatches: int, size: int) -> int:
    """Return the number of rounds of interleaved stages: one for each whole group of ``size`` micro-batches."""
    return max(1, microbatches // size)


#: Schedules by name. The last three split the backward pass as in zero bubble, Qi et al. 2023 (arXiv 2401.10241);
#: DualPipeV is DeepSeek's DualPipe (arXiv 2412.19437) in the form of a V.
SCHEDULES: dict[str, PipelineSchedule] = {
    # All forward passes, then all backward passes (Huang et al. 2019).
    "gpipe": PipelineSchedule(ScheduleGPipe),
    # Alternate as early as possible, so that at most as many micro-batches as stages are in flight.
    "1f1b": PipelineSchedule(Schedule1F1B, microbatches="stages"),
    # 1F1B with several shorter stages per rank (Narayanan et al. 2021, arXiv 2104.04473), which divides the bubble by
    # their number.
    "interleaved1f1b": PipelineSchedule(ScheduleInterleaved1F1B, "several", microbatches="rounds"),
    # All micro-batches of one stage before the next stage (Lamy-Poirier 2022, arXiv 2211.05953).
    "looped_bfs": PipelineSchedule(ScheduleLoopedBFS, "several"),
    "interleaved_zero_bubble": PipelineSchedule(
        ScheduleInterleavedZeroBubble, "several", microbatches="rounds", splits_backward=True, bubble_units=1
    ),
    "zbv": PipelineSchedule(ScheduleZBVZeroBubble, 2, "v", splits_backward=True, bubble_units=0),
    "dualpipev": PipelineSchedule(
        ScheduleDualPipeV, 2, "v", microbatches="stages", splits_backward=True, bubble_units=2
    ),
}
