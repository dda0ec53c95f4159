"""The series of a running run: drained from all ranks periodically, and appended to one file by rank 0.

No rank holds more than the steps since the last drain, and nothing is gathered twice: the cost of a save or an
evaluation does not grow with the number of steps.
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
from ptdbench.launch.peers import gather
from ptdbench.records import series, store
from ptdbench.report.tensorboard import Live
from ptdbench.terminal import say
from ptdbench.training.loop import StepLoop

#: Steps after which the series are drained and shown, if no evaluation does so earlier.
DRAIN_EVERY = 1000


class Recorder:
    """Gathers the measurements of all ranks for the series file and TensorBoard.

    Attributes:
        path: The series file, written by rank 0.
        warnings: Which steps before this process have lost their numbers, and why.

    Args:
        job: The run.
        loop: The step loop.
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
        """Take over the steps done before this process; called in all ranks, before the first step.

        Args:
            steps: Number of these steps.
            source: Directory of the run that did them.
            facts: Facts of its checkpoint: the ``segments`` and, before schema 2, the series too.
        """
        facts = facts or {}
        lists = ("timed_seconds", "rank_step_seconds")  # before schema 2
        earlier = facts.get("segments", [])
        self._earlier = [{name: value for name, value in one.items() if name not in lists} for one in earlier]
        if self._job.world.rank > 0:
            return
        if (known := self._take_over(steps, source, facts)) < steps:
            series.append(self.path, series.unknown(steps - known))
            lost = (
                f"{source}/{series.NAME} holds {known} of the {steps} steps before: the numbers of the others are lost"
            )
            self.warnings.append(lost)
            say(f"warning: {lost}", sys.stderr)

    @property
    def due(self) -> bool:
        """Whether the last :meth:`show` was :data:`DRAIN_EVERY` steps ago."""
        return self._loop.taken - self._shown >= DRAIN_EVERY

    def drain(self) -> None:
        """Gather the steps since the last call; called in all ranks, between two steps."""
        if not self._loop.losses:
            return
        with self._job.watchdog.paused():
            rows = self._gathered()
            if self._job.world.rank == 0:
                self._unwritten.append(rows)
                if self._live:
                    self._unshown.append(rows)
                with suppress(OSError):  # retried with the next steps; finish() reports it
                    self._write()
            dist.barrier()  # else the others would wait for rank 0 inside their next, timed step

    def show(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Write new steps and these ``evaluations`` to TensorBoard; called in all ranks, between two steps."""
        self.drain()
        self._shown = self._loop.taken
        if self._live and self._unshown:
            rows, self._unshown = np.concatenate(self._unshown), []
            with suppress(OSError):  # training continues if curves cannot be written
                known = store.load_record(self._job.directory)
                self._live.show(known, self._loop.done - len(rows), rows, evaluations)
        dist.barrier()

    def segments(self) -> list[dict[str, Any]]:
        """One segment per start of the run so far, as in a record except ``warmup_steps``; called in all ranks.

        The first call gathers the ranks' startup times up to the end of the first step.
        """
        if self._startup is None:
            self._startup = _until_the_last(gather(self._job.watch.laps))
        mine = {
            "first_step": self._loop.first_step,
            "steps": self._loop.taken,
            "layout": _layout(self._job),
            "startup_seconds": self._startup,
        }
        return [*self._earlier, mine]

    def finish(self) -> int:
        """Write the last steps to disk; called in all ranks.

        Returns:
            Number of steps already written to TensorBoard.

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
        """Start the file with the first steps of another one, or of itself; returns how many were found."""
        if "losses" in facts:
            series.write(self.path, [series.from_lists(facts)])
            return series.keep(self.path, steps)
        if source is None or source == self._job.directory:
            return series.keep(self.path, steps)
        return series.copy(source / series.NAME, self.path, steps)

    def _gathered(self) -> np.ndarray:
        """The rows of the steps since the last drain, the same on every rank."""
        job, noted = self._job, self._loop.drain()
        losses = torch.stack(noted.losses).flatten().double() * self._loop.engine.owns_loss
        dist.all_reduce(losses)
        most = torch.tensor([noted.wait_seconds, noted.memory_bytes], dtype=torch.float64, device=job.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        seconds = torch.zeros(len(losses), job.world.size, dtype=torch.float64, device=job.device)
        seconds[:, job.world.rank] = torch.tensor(noted.seconds, dtype=torch.float64)
        dist.all_reduce(seconds)  # gloo cannot gather GPU tensors

        rows = series.unknown(len(losses), job.world.size)
        rows["loss"] = _finite(losses / job.training.layout.replicas)  # divide after the sum
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
    """What must be equal for the times of steps to be comparable."""
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
    """Rank 0's laps, with the first step extended until the last rank has finished its own."""
    ends = [sum(of_rank.values()) for of_rank in laps]
    waited = max(ends) - ends[0]
    return laps[0] | {"first_step": laps[0].get("first_step", 0.0) + waited}  # missing if no steps were left
