"""The checkpoints of a run: resuming from one and writing new ones."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec import convert, to_builtins

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Checkpoint
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import TrainingState
from ptdbench.job import Job
from ptdbench.launch import rendezvous
from ptdbench.launch.collect import barrier, gather
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records.schema import Evaluation
from ptdbench.setup import run_spec
from ptdbench.terminal import echo
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.loop import StepLoop
from ptdbench.training.recorder import Recorder


class Checkpointing:
    """Resumes a run from its last checkpoint and writes new ones, with the evaluations before them.

    The recorder is drained before each save, so that checkpoint and series on disk are consistent.
    """

    def __init__(self, job: Job, loop: StepLoop, evaluator: Evaluator, recorder: Recorder) -> None:
        self._job = job
        self._loop = loop
        self._evaluator = evaluator
        self._recorder = recorder
        self._state = TrainingState(loop.engine.module, loop.update.optimizer, job.training.tied, job.world.rank)
        self._saver: Saver | None = None
        self._saved = -1
        self._passed_over: list[str] = []
        self.resumed: str | None = None  #: Step and checkpoint that this process resumed from, and changes of layout.
        self._patience = rendezvous.patience_for(job.spec.config.general.timeout_minutes)
        options = job.spec.config.checkpoint
        if options.every_steps:
            if job.world.is_first:
                with suppress(OSError):  # an unwritable directory is reported at the first save
                    checkpoint_dir.remove_partial(job.directory)
            barrier()  # rank 0 may have renamed a checkpoint that the others search for
            self._saver = Saver(
                job.directory, keep=options.keep, asynchronous=options.asynchronous, patience=self._patience
            )
            loop.update.before_change = self._saver.settle
            self._state.note_buffers()

    @property
    def saved(self) -> bool | None:
        """Whether the last step is on disk, after :meth:`finish`; ``None`` if this run saves nothing."""
        return self._loop.done in self._saver.saved[-1:] if self._saver else None

    @property
    def problems(self) -> list[str]:
        """Checkpoints that were skipped or could not be written, and why."""
        return [*self._passed_over, *(self._saver.problems if self._saver else [])]

    def resume(self) -> None:
        """Resume from the newest checkpoint of this run, else of the run that ``resume`` names, if there is one.

        Called in all ranks, before the first step.

        Raises:
            ConfigError: The run that ``resume`` names has no checkpoint that this run can resume from.
        """
        if (newest := self._search()) is None:
            self._recorder.begin()
        else:
            self._begin_with(*newest)

    def _search(self) -> tuple[Checkpoint, dist.ProcessGroup] | None:
        """Return the checkpoint to resume from, with a CPU process group of all ranks."""
        named = self._job.spec.config.general.resume
        directories = [self._job.directory, *([Path(named)] if named else [])]
        # Rank 0's view: on a network file system another host may see fewer directories, and not join the search.
        sources: list[Path] = gather([source for source in directories if (source / checkpoint_dir.FOLDER).exists()])[0]
        if not (sources or named):
            return None
        group: Any = self._saver.group if self._saver else dist.new_group(timeout=self._patience, backend="gloo")
        for source in sources:
            search = checkpoint_dir.newest(source, group)
            self._passed_over += search.warnings
            if self._saver:
                self._saver.broken |= search.broken.keys()
            if self._job.world.is_first:
                for warning in search.warnings:
                    echo(f"warning: {warning}", sys.stderr)
            if search.checkpoint:
                return search.checkpoint, group
        if named:
            raise ConfigError([Problem("resume", named, "has no complete checkpoint", "omit it to start over")])
        return None

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due, regardless of evaluations; all ranks agree after the same step."""
        interval = self._job.spec.config.checkpoint.every_steps
        return interval is not None and self._loop.done % interval == 0

    def save(self) -> None:
        """Save the last step unless it is saved; called in all ranks, between two steps."""
        if self._saver and self._saved != self._loop.done:
            with self._job.watchdog.paused(), self._job.display.during("saving"):
                self._save(self._saver)

    def finish(self) -> None:
        """Save the last step unless it is saved, and wait until it is on disk."""
        self.save()
        if self._saver:
            with self._job.watchdog.paused(), self._job.display.during("saving"):
                self._saver.close()

    def _save(self, saver: Saver) -> None:
        self._recorder.drain()
        facts = {
            "segments": to_builtins(self._recorder.segments()),
            "scaler": self._loop.update.scaler.state_dict(),
            "evaluations": to_builtins(self._evaluator.done),
            "data": self._identity(),
        }
        is_first = self._loop.replica == 0
        tensors = self._state.collect(with_buffers=is_first, local=self._state.own_buffers(first_replica=is_first))
        model = self._job.spec.config.resolved["model"]
        saver.save(self._loop.done, tensors, model, facts, self._state.steady(tensors))
        self._saved = self._loop.done

    def _begin_with(self, checkpoint: Checkpoint, group: dist.ProcessGroup) -> None:
        facts = checkpoint.manifest.facts
        require(self._same_data(checkpoint, group))
        layout, step = self._job.training.layout, checkpoint.manifest.step
        reshaped = run_spec.change_of_shape(checkpoint.manifest, layout.dims.world_size, layout.as_dict())
        self._state.restore(checkpoint.path, same_layout=reshaped is None, group=group)
        if (scaler := self._loop.update.scaler).is_enabled() and facts.get("scaler"):
            scaler.load_state_dict(facts["scaler"])
        self._loop.first_step = step
        source = checkpoint.path.parent.parent
        if source == self._job.directory:
            self._saved = step
        self.resumed = f"after step {step}, from {checkpoint.path}"
        if reshaped:
            if self._state.differed:
                reshaped += (
                    f"; replica 0's buffers for all, as some differed between ranks, such as {self._state.differed}"
                )
            self.resumed += f", with {reshaped}"
            if self._job.world.is_first:
                echo(f"{checkpoint.path}: continues with {reshaped}", sys.stderr)
        self._recorder.begin(step, source, facts)
        self._evaluator.done = convert(facts.get("evaluations", []), list[Evaluation])
        if self._saver and self._saved >= 0:
            self._saver.saved.append(self._saved)

    def _same_data(self, checkpoint: Checkpoint, group: dist.ProcessGroup) -> Problem | None:
        """Return a problem if the data has changed: sample numbers would denote other samples."""
        data, identity = self._job.spec.config.call("data").name, checkpoint.manifest.facts.get("data")
        if identity is None or identity == gather(self._identity(), group)[0]:
            return None
        rule = f"data={data} has changed since this checkpoint"
        return Problem("resume", checkpoint.path, rule, "restore the data, or start a new run without resume")

    def _identity(self) -> str | None:
        """Return a digest of the data, on rank 0 only: it may require a stat of every file."""
        return self._job.training.data.identity if self._job.world.is_first else None
