"""The progress line of a run whose loss may be known to another rank than the one that draws it."""

from __future__ import annotations

import io
import sys
import time
from contextlib import nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ptdbench.job import Job
from ptdbench.report.progress import Progress
from ptdbench.training.loop import StepLoop

_KEY, _LAST_KEY = "pulse", "pulse at the end"
_TELL_SECONDS = 0.5  # as often as a terminal's line is redrawn
#: How long the line waits for the last loss: a stage that never tells it has died, and the run knows soon enough.
_LAST_WAIT = timedelta(seconds=5)


class Pulse:
    """Shows how a run is doing, between its steps.

    Rank 0 draws. Under a pipeline the loss is computed by the last stage, which then leaves it in the run's store
    every now and then: no rank waits for another before the last step is over, and no step is disturbed.
    """

    def __init__(self, job: Job, steps: int, knows: bool) -> None:
        per_sample = job.training.data.tokens_per_sample
        self._draws = job.world.rank == 0
        self._loss: float | None = None
        self._knows, self._tells = knows, knows and not self._draws
        self._store = job.store
        now = time.perf_counter()
        self._next_told = now
        self._progress = Progress(
            steps,
            "tokens" if per_sample else "samples",
            units_per_step=job.training.layout.global_batch * (per_sample or 1),
            label=job.spec.label,
            now=now,
            stream=sys.stderr if self._draws else io.StringIO(),
            directory=job.directory if self._draws and not job.world.started_by.has_parent else None,
        )

    def beat(self, loop: StepLoop, steps: int, remark: str = "") -> None:
        """Between two steps, of which there will be ``steps``: show or tell what is known, if it is time to.

        Args:
            loop: Takes the steps.
            steps: How many there will be.
            remark: What a person who watches should read beside the loss.
        """
        now, done = time.perf_counter(), loop.done
        at_end = done == steps
        if self._tells and (at_end or now >= self._next_told):
            self._next_told = now + _TELL_SECONDS
            if (loss := self._latest(loop)) is not None:
                self._store.set(_LAST_KEY if at_end else _KEY, str(loss))
        elif self._draws and (at_end or self._progress.due(now)):
            self._progress.total_steps = steps
            self._progress.show(done, self._latest(loop) if self._knows else self._told(at_end), now, remark)

    def close(self) -> None:
        """End the line."""
        self._progress.close()

    def _latest(self, loop: StepLoop) -> float | None:
        """The last loss that is known, which those before may be drained of."""
        self._loss = self._loss if (loss := _finished(loop)) is None else loss
        return self._loss

    def _told(self, at_end: bool) -> float | None:
        """The loss that the last stage has told."""
        if at_end:
            with suppress(dist.DistStoreError):
                self._store.wait([_LAST_KEY], _LAST_WAIT)
        key = next((key for key in (_LAST_KEY, _KEY) if self._store.check([key])), None)
        return float(self._store.get(key)) if key else None


def _finished(loop: StepLoop) -> float | None:
    """The loss of the latest undrained step that the device has finished, without waiting for those in its queue."""
    known = next((step for step in reversed(range(len(loop.losses))) if loop.clock.over(step)), None)
    if known is None:
        return None
    loss = loop.losses[known]
    # On the stream of the steps the copy would stand in line behind them.
    with torch.cuda.stream(torch.cuda.Stream(loss.device)) if loss.is_cuda else nullcontext():
        return loss.item()
