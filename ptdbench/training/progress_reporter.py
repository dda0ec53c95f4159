"""Reports the steps of a training run to its display, and to those who ask for its status."""

from __future__ import annotations

import time
from collections.abc import Callable

from ptdbench.job import Job
from ptdbench.records.ownership import ProgressFile
from ptdbench.training.loop import StepLoop


def begin(job: Job, loop: StepLoop, steps: int) -> Callable[[int], None]:
    """Begin to report ``steps`` steps; return a function to call between two, with their number, which may change."""
    display, shows, per_sample = job.display, job.world.is_first, job.training.data.tokens_per_sample
    unit = "tokens" if per_sample else "samples"
    batch = None if job.spec.virtual else job.training.layout.global_batch  # virtual GPUs have no rate
    name = "first step, compiling" if job.spec.config.general.compile else "first step"
    display.begin_steps(loop.done, steps, unit, batch and batch * (per_sample or 1), name)
    in_job = shows and not job.world.started_by.has_parent
    file = ProgressFile(job.directory, unit) if in_job else None

    def report(steps: int) -> None:
        now, done = time.perf_counter(), loop.done
        display.step(done, now)
        if shows and (done == steps or display.due(now)):
            display.total_steps = steps
            rate = display.show(now)
            if file:
                file.write(done, steps, rate, now)

    return report
