"""What outlives a run's processes: its checkpoints, and the steps that earlier processes have done."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ptdbench.checkpoints import shelf, state
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.shelf import Found
from ptdbench.workloads import agreement
from ptdbench.workloads.job import Job
from ptdbench.workloads.loop import StepLoop


@dataclass
class History:
    """The steps before those of this process.

    Attributes:
        losses: The global batch's mean loss at each of them.
        step_memory_bytes: Memory in use after each of them.
        segments: What each earlier start of the run has done; see :func:`ptdbench.workloads.agreement.segment`.
        resumed_from: The checkpoint that this process began with.
        warnings: Checkpoints that were passed over, and why.
    """

    losses: list[float] = field(default_factory=list)
    step_memory_bytes: list[int] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    resumed_from: str | None = None
    warnings: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """What of it goes into the next checkpoint."""
        return {
            "losses": self.losses,
            "step_memory_bytes": self.step_memory_bytes,
            "segments": self.segments,
        }


class Keeper:
    """Begins a run where its last checkpoint ends, and makes the next ones.

    Attributes:
        history: The steps before those of this process.

    Args:
        job: The run.
        loop: Its step loop, before the first step.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self._job = job
        self._loop = loop
        self._every = job.plan.config.checkpoint.every_steps
        self._saver: Saver | None = None
        self._saved = -1
        self.history = History()
        if self._every:
            if job.world.rank == 0:
                with suppress(OSError):  # a directory that cannot be written to is reported when it matters
                    shelf.sweep_partial(job.directory)
            dist.barrier()  # the others may look for a checkpoint whose name rank 0 has just put right
            options = job.plan.config.checkpoint
            self._saver = Saver(job.directory, keep=options.keep, asynchronous=options.asynchronous)

    @property
    def saves(self) -> bool:
        """Whether this run makes checkpoints."""
        return self._saver is not None

    @property
    def problems(self) -> list[str]:
        """Checkpoints that could not be written, and why."""
        return self._saver.problems if self._saver else []

    def resume(self) -> None:
        """Take the place of whoever was here before: of this run itself, else of the one that ``resume`` names.

        Raises:
            ConfigError: The run that ``resume`` names has no checkpoint that this one could begin with.
        """
        named = self._job.plan.config.general.resume
        sources = [self._job.directory, *([Path(named)] if named else [])]
        if not any((source / shelf.FOLDER).exists() for source in sources):
            return
        group: Any = self._saver.group if self._saver else dist.new_group(backend="gloo")
        for source in sources:
            search = shelf.newest(source, group)
            self.history.warnings += search.warnings
            if search.found:
                self._begin_with(search.found, group)
                return

    def after_step(self) -> None:
        """Between two steps: save if it is time to."""
        if self._saver and self._every and self._loop.done % self._every == 0:
            with self._job.watchdog.paused():
                self._save(self._saver)

    def finish(self) -> None:
        """Save what has not been saved, and wait until it is on the disk."""
        if self._saver:
            with self._job.watchdog.paused():
                if self._saved != self._loop.done:
                    self._save(self._saver)
                self._saver.close()

    def _begin_with(self, found: Found, group: dist.ProcessGroup) -> None:
        state.restore(
            found.path,
            self._loop.engine.module,
            self._loop.optimizer,
            self._job.training.model.tied(),
            rank=self._job.world.rank,
            world_size=self._job.world.size,
            group=group,
        )
        facts = found.manifest.facts
        self._loop.go_on(found.manifest.step, facts["scaler"])
        self._saved = found.manifest.step if found.path.parent.parent == self._job.directory else -1
        self.history.losses = [_number(loss) for loss in facts["losses"]]
        self.history.step_memory_bytes = list(facts["step_memory_bytes"])
        self.history.segments = list(facts["segments"])
        self.history.resumed_from = str(found.path)

    def _save(self, saver: Saver) -> None:
        tensors = state.collect(
            self._loop.engine.module,
            self._loop.optimizer,
            self._job.training.model.tied(),
            rank=self._job.world.rank,
            with_buffers=self._loop.replica == 0,
        )
        agreed = agreement.reach(self._job, self._loop)
        facts = agreement.joined(self.history.facts(), self._job, agreed) | {"scaler": self._loop.scaler_state()}
        saver.save(self._loop.done, tensors, self._job.plan.config.resolved["model"], facts)
        self._saved = self._loop.done


def _number(loss: float | None) -> float:
    """JSON has no NaN: there it is null."""
    return float("nan") if loss is None else loss
