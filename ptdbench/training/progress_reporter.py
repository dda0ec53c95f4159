"""Reports the steps of a training run; the loss may be on a rank other than the one that displays it."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from ptdbench.job import Job
from ptdbench.records.ownership import ProgressFile
from ptdbench.training.loop import StepLoop

_KEY, _LAST_KEY = "progress/loss", "progress/last_loss"
_PUBLISH_SECONDS = 0.5  # the refresh interval of the display
#: How long rank 0 waits for the last loss: a stage that never publishes it has died, which is detected elsewhere.
_LAST_WAIT = timedelta(seconds=5)


class ProgressReporter:
    """Reports the progress of a run between its steps.

    Rank 0 displays it. Under a pipeline the last stage computes the loss and publishes it periodically in the run's
    store, so that no rank waits for another before the last step.
    """

    def __init__(self, job: Job, loop: StepLoop, steps: int) -> None:
        per_sample = job.training.data.tokens_per_sample
        unit = "tokens" if per_sample else "samples"
        self._loop, self._store, self._display = loop, job.store, job.display
        self._shows = job.world.is_first
        self._has_figures = not job.spec.virtual  # virtual GPUs compute no loss, and have no rate
        self._owns_loss = self._has_figures and loop.engine.owns_loss and loop.replica == 0
        self._publishes = self._owns_loss and not self._shows
        self._loss: float | None = None
        self._next_publish = time.perf_counter()
        in_job = self._shows and not job.world.started_by.has_parent
        self._file = ProgressFile(job.directory, unit) if in_job else None
        self._display.begin_steps(
            loop.done,
            steps,
            unit,
            units_per_step=job.training.layout.global_batch * (per_sample or 1) if self._has_figures else None,
            name="first step, compiling" if job.spec.config.general.compile else "first step",
        )

    def report(self, steps: int) -> None:
        """Show or publish the latest loss if an update is due; called between two steps."""
        now, done = time.perf_counter(), self._loop.done
        at_end = done == steps
        self._display.step(done, now)
        if self._publishes and (at_end or now >= self._next_publish):
            self._next_publish = now + _PUBLISH_SECONDS
            if (loss := self._latest()) is not None:
                self._store.set(_LAST_KEY if at_end else _KEY, str(loss))
        elif self._shows and (at_end or self._display.due(now)):
            self._display.total_steps = steps
            loss = self._latest() if self._owns_loss else self._published(at_end)
            rate = self._display.show(loss, now)
            if self._file:
                self._file.write(done, steps, rate, now)

    def _latest(self) -> float | None:
        """Return the latest known loss, which is kept after its step is drained."""
        self._loss = self._loss if (loss := _finished(self._loop)) is None else loss
        return self._loss

    def _published(self, at_end: bool) -> float | None:
        """Return the loss published by the last stage, if there is one."""
        if not self._has_figures:
            return None
        if at_end:
            with suppress(dist.DistStoreError):
                self._store.wait([_LAST_KEY], _LAST_WAIT)
        key = next((key for key in (_LAST_KEY, _KEY) if self._store.check([key])), None)
        return float(self._store.get(key)) if key else None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all copies: torch's pool of 32 includes those of collectives, which would delay a copy."""
    return torch.cuda.Stream(device)


def _finished(loop: StepLoop) -> float | None:
    """Return the loss of the latest undrained step that the device has finished, without waiting for queued steps."""
    known = next((step for step in reversed(range(len(loop.losses))) if loop.clock.over(step)), None)
    if known is None:
        return None
    loss = loop.losses[known]
    # On the stream of the steps, the copy would wait for them.
    with torch.cuda.stream(_stream(loss.device)) if loss.is_cuda else nullcontext():
        loop.clock.follow(known)  # also orders the streams for a sanitizer
        return loss.item()
