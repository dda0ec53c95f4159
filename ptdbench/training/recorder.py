"""A run's series while it goes on: drained from all ranks now and then, and appended to one file by rank 0.

Nobody holds more than the steps since the last time, and nothing is brought together twice: a save or an evaluation
costs the same after a million steps as after ten.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ptdbench.job import Job
from ptdbench.records import series, store
from ptdbench.report.tensorboard import Live
from ptdbench.terminal import say
from ptdbench.training.loop import StepLoop

#: Steps after which what the ranks hold is drained and shown, where no evaluation does it.
DRAIN_EVERY = 1000


class Recorder:
    """Brings together what the ranks note of their steps, for the series file and for TensorBoard.

    Attributes:
        path: The series file, which rank 0 writes.
        warnings: Steps before those of this process whose numbers are lost, and why.

    Args:
        job: The run.
        loop: Takes the steps.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self.path = job.directory / series.NAME
        self.warnings: list[str] = []
        self._job = job
        self._loop = loop
        self._earlier: list[dict[str, Any]] = []
        self._startup: dict[str, float] | None = None
        self._unwritten: list[np.ndarray] = []
        self._unshown: list[np.ndarray] = []
        self._shown = 0
        shows = job.world.rank == 0 and job.spec.config.eval.every is not None
        self._live = Live(job.directory) if shows else None

    def begin(self, steps: int = 0, source: Path | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Take over the steps before those of this process; called in all ranks, before the first step.

        Args:
            steps: How many there are.
            source: The directory of the run that has done them.
            facts: Those of its checkpoint: their ``segments`` and, before schema 2, the series too.
        """
        facts = facts or {}
        lists = ("timed_seconds", "rank_step_seconds")  # before schema 2
        earlier = facts.get("segments", [])
        self._earlier = [{name: value for name, value in one.items() if name not in lists} for one in earlier]
        if self._job.world.rank > 0:
            return
        if (known := self._take_over(steps, source, facts)) < steps:
            series.append(self.path, series.unknown(steps - known))
            lost = f"{source}/{series.NAME} holds {known} of the {steps} steps before: the others have no numbers"
            self.warnings.append(lost)
            say(f"warning: {lost}", sys.stderr)

    @property
    def due(self) -> bool:
        """Whether :meth:`show` was not called for :data:`DRAIN_EVERY` steps."""
        return self._loop.taken - self._shown >= DRAIN_EVERY

    def drain(self) -> None:
        """Bring together the steps since the last time; called in all ranks, between two steps."""
        if not self._loop.losses:
            return
        with self._job.watchdog.paused():
            rows = self._gathered()
            if self._job.world.rank == 0:
                self._unwritten.append(rows)
                if self._live:
                    self._unshown.append(rows)
                with suppress(OSError):  # another try with the next ones; finish() tells
                    self._write()
            dist.barrier()  # else the others would wait for rank 0 within their next step, under its clock

    def show(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Let TensorBoard show new steps and these ``evaluations``; called in all ranks, between two steps."""
        self.drain()
        self._shown = self._loop.taken
        if self._live and self._unshown:
            rows, self._unshown = np.concatenate(self._unshown), []
            with suppress(OSError):  # nobody stops training because curves cannot be written
                known = store.load_record(self._job.directory)
                self._live.show(known, self._loop.done - len(rows), rows, evaluations)
        dist.barrier()

    def segments(self) -> list[dict[str, Any]]:
        """One for each start of the run so far, as in a record but for ``warmup_steps``; called in all ranks.

        The ranks' own times until the end of the first step are brought together when this is called first.
        """
        if self._startup is None:
            laps: list[Any] = [None] * self._job.world.size
            dist.all_gather_object(laps, self._job.watch.laps)
            self._startup = _until_the_last(laps)
        mine = {
            "first_step": self._loop.first_step,
            "steps": self._loop.taken,
            "layout": _layout(self._job),
            "startup_seconds": self._startup,
        }
        return [*self._earlier, mine]

    def finish(self) -> int:
        """Bring the last steps to the disk; called in all ranks.

        Returns:
            How many steps TensorBoard shows already.

        Raises:
            OSError: They could not be written.
        """
        self.drain()
        self._write()
        if self._live is None:
            return 0
        self._live.close()
        return self._live.shown

    def _take_over(self, steps: int, source: Path | None, facts: Mapping[str, Any]) -> int:
        """Begin the file with so many steps of another one, or of this one itself; how many there were."""
        if "losses" in facts:
            series.write(self.path, [series.from_lists(facts)])
            return series.keep(self.path, steps)
        if source is None or source == self._job.directory:
            return series.keep(self.path, steps)
        return series.copy(source / series.NAME, self.path, steps)

    def _gathered(self) -> np.ndarray:
        """The rows of the steps since the last time, the same on every rank."""
        job, noted = self._job, self._loop.drain()
        losses = torch.stack(noted.losses).flatten().double() * self._loop.engine.owns_loss
        dist.all_reduce(losses)
        most = torch.tensor([noted.wait_seconds, noted.memory_bytes], dtype=torch.float64, device=job.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        seconds = torch.zeros(len(losses), job.world.size, dtype=torch.float64, device=job.device)
        seconds[:, job.world.rank] = torch.tensor(noted.seconds, dtype=torch.float64)
        dist.all_reduce(seconds)  # gloo gathers no tensors of GPUs

        rows = series.unknown(len(losses), job.world.size)
        rows["loss"] = _finite(losses / job.training.layout.replicas)  # after the sum, whose order does not matter then
        rows["learning_rate"] = noted.learning_rates
        if noted.gradient_norms:
            rows["gradient_norm"] = _finite(torch.stack(noted.gradient_norms))
        rows["wait_seconds"], rows["memory_bytes"] = most.cpu().numpy()
        rows["step_seconds"] = seconds.cpu().numpy()
        return rows

    def _write(self) -> None:
        while self._unwritten:
            series.append(self.path, self._unwritten[0])
            del self._unwritten[0]


def _layout(job: Job) -> dict[str, Any]:
    """What steps must have in common for their times to be comparable."""
    return {
        "parallel": job.spec.config.resolved["parallel"],
        "launcher": job.world.launcher,
        "nodes": sorted({peer.node for peer in job.peers}),
        **job.training.layout.as_dict(),
    }


def _finite(values: torch.Tensor) -> np.ndarray:
    found = values.double().cpu().numpy()
    return np.where(np.isfinite(found), found, np.nan)


def _until_the_last(laps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Rank 0's laps, the first step drawn out until the last rank had finished its own."""
    ends = [sum(of_rank.values()) for of_rank in laps]
    waited = max(ends) - ends[0]
    return laps[0] | {"first_step": laps[0].get("first_step", 0.0) + waited}  # none where there was nothing left to do
