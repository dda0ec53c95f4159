"""The progress line of a training run, whose loss may be on another rank than the one that prints it."""

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

_KEY, _LAST_KEY = "progress/loss", "progress/last_loss"
_PUBLISH_SECONDS = 0.5  # the refresh interval of the progress line
#: How long the line waits for the last loss: a stage that never publishes it has died, which is detected elsewhere.
_LAST_WAIT = timedelta(seconds=5)


class ProgressReporter:
    """Reports the progress of a run between its steps.

    Rank 0 prints. Under a pipeline the last stage computes the loss and publishes it periodically in the run's store:
    no rank waits for another before the last step is done.
    """

    def __init__(self, job: Job, steps: int, owns_loss: bool) -> None:
        per_sample = job.training.data.tokens_per_sample
        self._prints = job.world.rank == 0
        self._loss: float | None = None
        self._owns_loss, self._publishes = owns_loss, owns_loss and not self._prints
        self._store = job.store
        now = time.perf_counter()
        self._next_publish = now
        self._progress = Progress(
            steps,
            "tokens" if per_sample else "samples",
            units_per_step=job.training.layout.global_batch * (per_sample or 1),
            label=job.spec.label,
            now=now,
            stream=sys.stderr if self._prints else io.StringIO(),
            directory=job.directory if self._prints and not job.world.started_by.has_parent else None,
        )

    def report(self, loop: StepLoop, steps: int, remark: str = "") -> None:
        """Print or publish the latest loss if an update is due; called between two steps.

        Args:
            loop: The step loop.
            steps: Total number of steps.
            remark: Text to show beside the loss.
        """
        now, done = time.perf_counter(), loop.done
        at_end = done == steps
        if self._publishes and (at_end or now >= self._next_publish):
            self._next_publish = now + _PUBLISH_SECONDS
            if (loss := self._latest(loop)) is not None:
                self._store.set(_LAST_KEY if at_end else _KEY, str(loss))
        elif self._prints and (at_end or self._progress.due(now)):
            self._progress.total_steps = steps
            self._progress.show(done, self._latest(loop) if self._owns_loss else self._published(at_end), now, remark)

    def close(self) -> None:
        """End the line."""
        self._progress.close()

    def _latest(self, loop: StepLoop) -> float | None:
        """The latest known loss, kept after its step is drained."""
        self._loss = self._loss if (loss := _finished(loop)) is None else loss
        return self._loss

    def _published(self, at_end: bool) -> float | None:
        """The loss published by the last stage."""
        if at_end:
            with suppress(dist.DistStoreError):
                self._store.wait([_LAST_KEY], _LAST_WAIT)
        key = next((key for key in (_LAST_KEY, _KEY) if self._store.check([key])), None)
        return float(self._store.get(key)) if key else None


def _finished(loop: StepLoop) -> float | None:
    """The loss of the latest undrained step that the device has finished, without waiting for queued steps."""
    known = next((step for step in reversed(range(len(loop.losses))) if loop.clock.over(step)), None)
    if known is None:
        return None
    loss = loop.losses[known]
    # On the stream of the steps the copy would wait for them.
    with torch.cuda.stream(torch.cuda.Stream(loss.device)) if loss.is_cuda else nullcontext():
        return loss.item()
