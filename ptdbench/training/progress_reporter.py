"""Reports the steps of a training run to its display, and to those who ask for its status."""

from __future__ import annotations

import time

from ptdbench.job import Job
from ptdbench.records.ownership import ProgressFile
from ptdbench.training.loop import StepLoop


class ProgressReporter:
    """Reports the progress of a run between its steps, without a message between ranks."""

    def __init__(self, job: Job, loop: StepLoop, steps: int) -> None:
        per_sample = job.training.data.tokens_per_sample
        unit = "tokens" if per_sample else "samples"
        self._loop, self._display, self._shows = loop, job.display, job.world.is_first
        in_job = self._shows and not job.world.started_by.has_parent
        self._file = ProgressFile(job.directory, unit) if in_job else None
        samples = None if job.spec.virtual else job.training.layout.global_batch  # virtual GPUs have no rate
        self._display.begin_steps(
            loop.done,
            steps,
            unit,
            units_per_step=samples and samples * (per_sample or 1),
            name="first step, compiling" if job.spec.config.general.compile else "first step",
        )

    def report(self, steps: int) -> None:
        """Show the steps so far if an update is due; called between two steps."""
        now, done = time.perf_counter(), self._loop.done
        self._display.step(done, now)
        if self._shows and (done == steps or self._display.due(now)):
            self._display.total_steps = steps
            rate = self._display.show(now)
            if self._file:
                self._file.write(done, steps, rate, now)
