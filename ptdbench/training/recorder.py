"""Records the series of a run: drained from all ranks periodically, and appended to one file by rank 0.

Ranks hold only the steps since the last drain, so that a save or an evaluation does not get slower with the number of
steps. Drained steps also appear in TensorBoard and in the record's figures, which remain however the run ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import convert

from ptdbench.job import Job, Results
from ptdbench.launch.collect import barrier, gather, most, total
from ptdbench.measure import memory
from ptdbench.measure.results import Ceiling
from ptdbench.records import record, series, store
from ptdbench.records.schema import Evaluation, Segment, SegmentLayout
from ptdbench.report.loggers import Log, TensorBoard
from ptdbench.setup import choices
from ptdbench.terminal import echo
from ptdbench.training.loop import StepLoop
from ptdbench.training.metrics import ceiling_of_run, figures

#: The series are drained and shown about once per ``DRAIN_SECONDS``, and at least once per ``DRAIN_EVERY`` steps.
DRAIN_SECONDS, DRAIN_EVERY = 10.0, 1000

#: The second drain waits for this number of steps, so that the pace is measured without a drain.
_SECOND = 4

#: Figures are computed from all steps of a run; after ``_MANY`` steps this takes at most ``_SHARE`` of its time.
_MANY, _SHARE = 10_000, 0.01


class Recorder:
    """Gathers the measurements of all ranks for the series file and TensorBoard."""

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self.path = job.directory / series.NAME  #: The series file, written by rank 0.
        self.warnings: list[str] = []  #: Steps before this process whose figures are lost, and why.
        self._job = job
        self._loop = loop
        self._earlier: list[Segment] = []
        self._startup: dict[str, float] | None = None
        self._unwritten: list[np.ndarray] = []
        self._unshown: list[np.ndarray] = []
        self._shown_evaluations = 0
        self._next = 1
        self._seconds_per_step = 0.0
        self._drained_at = self._next_figures_at = time.perf_counter()
        writes = job.world.is_first and store.TRIES not in job.directory.parts
        services = [TensorBoard(), choices.build(job.spec.config, "logger")] if writes else []
        #: Writers of the run's curves to TensorBoard and a logging service, on rank 0; none for a try.
        self.logs = [Log(service, job.directory) for service in services if service]

    def begin(self, steps: int = 0, source: Path | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Adopt the steps done before this process; called in all ranks, before the first step.

        ``source``: the directory of the run that did them; ``facts``: from its checkpoint.
        """
        facts = facts or {}
        self._earlier = convert(facts.get("segments", []), list[Segment])
        self._shown_evaluations = len(facts.get("evaluations", []))
        if not self._job.world.is_first:
            return
        self._job.note(Results(steps=steps or None))  # drop steps of an earlier start after its last checkpoint
        if source is None or source == self._job.directory:
            kept = series.keep(self.path, steps)
        else:
            kept = series.copy(source / series.NAME, self.path, steps)
        if kept < steps:
            series.append(self.path, series.unknown(steps - kept))
            lost = f"{source}/{series.NAME} has {kept} of the {steps} earlier steps; the figures of the rest are lost"
            self.warnings.append(lost)
            echo(f"warning: {lost}", sys.stderr)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Abort the logs if the run fails on this rank; otherwise they get the outcome elsewhere."""
        if failed:
            for log in self.logs:
                log.abort(tells=not issubclass(failed, OSError))  # a full disk, which the run's own error reports

    @property
    def due(self) -> bool:
        """Whether :meth:`show` is due; all ranks agree after the same step.

        Steps at most double between two calls, so that at least half of them are kept however the run ends.
        """
        return self._loop.taken >= self._next

    def drain(self) -> None:
        """Gather the steps since the last call; called in all ranks, between two steps."""
        if not self._loop.losses:
            return
        rows = self._gathered()
        if self._job.world.is_first:
            self._unwritten.append(rows)
            self._unshown.append(rows)
            with self._job.watchdog.paused(), suppress(OSError):  # retried with the next steps; finish() reports it
                self._write()
        barrier()  # otherwise the other ranks would wait for rank 0 within the next timed step

    def show(self, evaluations: Sequence[Evaluation]) -> None:
        """Write new steps and evaluations to TensorBoard, and figures and all ``evaluations`` to the record.

        Called in all ranks, between two steps.
        """
        self.drain()
        taken, pace = self._loop.taken, max(self._seconds_per_step, 1e-9)
        affordable = max(1, int(min(DRAIN_EVERY, DRAIN_SECONDS / pace)))
        self._next = taken + min(affordable, max(taken, _SECOND - taken))
        results = self.figures(if_quick=True)
        if self._job.world.is_first:
            with self._job.watchdog.paused():  # on rank 0 only: another rank that misses the barrier is stuck
                if results.metrics:
                    results.evaluations = evaluations
                    self._job.note(results)
                self._show(evaluations)
        barrier()

    def _show(self, evaluations: Sequence[Evaluation]) -> None:
        if self._unshown:
            rows = np.concatenate(self._unshown)
            with suppress(OSError, store.Damaged):  # training continues if the record cannot be read
                run = store.read_record(self._job.directory)
                for log in self.logs:
                    log.show(run, self._loop.done - len(rows), rows, evaluations[self._shown_evaluations :])
                self._unshown, self._shown_evaluations = [], len(evaluations)

    def figures(self, if_quick: bool = False) -> Results:
        """Return the measured results on rank 0, if all steps so far are on disk; else none.

        Called in all ranks, between two steps. ``if_quick``: return none if they would take too long.
        """
        peaks = (read(self._job.device) for read in (memory.peak_bytes, memory.peak_reserved_bytes))
        outside, size = memory.outside_and_size(self._job.device)
        allocated, reserved, outside, negative = map(int, most(*peaks, outside, -size))
        segments = self.segments()
        started = time.perf_counter()
        if not self._job.world.is_first or self._unwritten or (if_quick and started < self._next_figures_at):
            return Results()
        with self._job.watchdog.paused():
            results = figures(self._job, self.path, segments, self._ceiling)
        if measured := results.metrics:
            measured.peak_memory_bytes, measured.peak_reserved_bytes = allocated, reserved or None
            if size:
                measured.outside_memory_bytes, measured.device_memory_bytes = outside, -negative
        took = time.perf_counter() - started
        self._next_figures_at = started + (took / _SHARE if self._loop.done >= _MANY else 0.0)
        return results

    @cached_property
    def _ceiling(self) -> Ceiling | None:
        return ceiling_of_run(self._job)

    def segments(self) -> list[Segment]:
        """Return a segment per start of the run, the last one without its ``warmup_steps``; called in all ranks.

        The first call gathers the startup times, up to the end of the first step on the last rank.
        """
        if self._startup is None:
            laps = gather(self._job.watch.laps)
            ends = [sum(of_rank.values()) for of_rank in laps]
            first_step = laps[0].get("first_step", 0.0) + (max(ends) - ends[0])  # missing if no steps were left
            self._startup = laps[0] | {"first_step": first_step}
        return [*self._earlier, Segment(self._loop.first_step, self._loop.taken, _layout(self._job), self._startup)]

    def finish(self) -> None:
        """Write the last steps to disk, or raise OSError; called in all ranks."""
        self.drain()
        self._write()

    def _gathered(self) -> np.ndarray:
        """Gather the rows of the steps since the last drain, equal on all ranks."""
        job, loop, update = self._job, self._loop, self._loop.update
        losses = total(torch.stack(loop.losses).flatten().double().cpu() * loop.engine.owns_loss)
        now, count = time.perf_counter(), len(losses)
        pace = (now - self._drained_at) / count
        self._seconds_per_step, *waits_and_memory = most(pace, *loop.feed.wait_seconds, *loop.memory_bytes)
        self._drained_at = now
        seconds = torch.zeros(count, job.world.size, dtype=torch.float64)
        seconds[:, job.world.rank] = torch.tensor(loop.clock.seconds(), dtype=torch.float64)

        rows = series.unknown(count, job.world.size)
        rows["memory_bytes"] = waits_and_memory[count:]
        rows["learning_rate"] = update.learning_rates
        seconds = total(seconds)
        if not job.spec.virtual:  # virtual GPUs compute no losses or norms, and their times mean nothing
            rows["loss"] = _finite_or_nan(losses / job.training.layout.replicas)  # divide after the sum
            job.display.loss = loop.done, float(rows["loss"][-1])
            if update.gradient_norms:
                rows["gradient_norm"] = _finite_or_nan(torch.stack(update.gradient_norms))
            rows["wait_seconds"] = waits_and_memory[:count]
            rows["step_seconds"] = seconds.numpy()
        loop.forget()
        return rows

    def _write(self) -> None:
        while self._unwritten:
            series.append(self.path, self._unwritten[0])
            del self._unwritten[0]


#: Options that do not affect step times: a continued run may change them.
_TIMELESS = ("train.steps", "train.max_minutes", "eval.every", "checkpoint.every_steps", "checkpoint.keep")


def _layout(job: Job) -> SegmentLayout:
    return SegmentLayout(
        parallel=job.spec.config.resolved["parallel"],
        launcher=job.world.launcher,
        nodes=sorted({peer.node for peer in job.peers}),
        work=record.work(job.spec.config.resolved, _TIMELESS),
        **job.training.layout.as_dict(),
    )


def _finite_or_nan(values: torch.Tensor) -> np.ndarray:
    numbers = values.double().cpu().numpy()
    return np.where(np.isfinite(numbers), numbers, np.nan)
