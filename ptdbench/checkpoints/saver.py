"""Saving during training: tensors are copied, and a thread writes the copies."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ptdbench.checkpoints import manifest, reading, shelf
from ptdbench.checkpoints.manifest import Manifest, Stamp
from ptdbench.checkpoints.shares import Shares
from ptdbench.checkpoints.staging import Staging
from ptdbench.checkpoints.together import gathered, place
from ptdbench.launch import cores

T = TypeVar("T")

Facts = Mapping[str, Any]

#: What to save, as soon as it is copied, and the facts.
Prepared = tuple[Callable[[], dict[str, Tensor]], Facts]

#: Added to the writing thread's nice value, so that training has priority on the cores.
_NICE = 10


class Saver:
    """Writes a run's checkpoints; created, used and closed in all ranks.

    A save that fails in any rank leaves no checkpoint and adds a line to the :attr:`problems` of every rank; the run
    continues.

    Attributes:
        group: All ranks, on the CPU. Used by the writing thread; others may use it while no save is in progress.
        saved: Steps whose checkpoint is on disk, in the order of saving.
        problems: One line for each failed save.
        stall_seconds: How long each :meth:`save` blocked its caller.
        best: On rank 0 the step of the best checkpoint, which is kept beside the newest and marked.

    Args:
        run_directory: The run's directory, the same for all ranks.
        keep: Number of complete checkpoints to keep, at least 1.
        asynchronous: Write in a separate thread. Otherwise :meth:`save` returns when all is on disk, without a copy.
    """

    def __init__(self, run_directory: Path, *, keep: int, asynchronous: bool = True) -> None:
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))  # contains all ranks
        self.saved: list[int] = []
        self.problems: list[str] = []
        self.stall_seconds: list[float] = []
        self.best: int | None = None
        self._run_directory = run_directory
        self._keep = keep
        self._rank, self._world_size = place(self.group)
        self._shares = Shares(self.group)
        self._staging = Staging() if asynchronous else None
        self._thread: threading.Thread | None = None

    def resume(self, best: int) -> None:
        """Continue after an earlier saver of this run, whose best checkpoint is that of step ``best``."""
        self.best = best

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        model: Mapping[str, Any],
        facts: Facts | Callable[[], Facts],
    ) -> None:
        """Save the current values of ``tensors``; called in all ranks, between two steps.

        Waits for the previous save. Ranks may pass different tensors; tensors of the same name must be equal, and are
        written once, each by one of the ranks that have it: nothing else is copied.

        Args:
            step: Number of optimizer steps done.
            tensors: By name, as :func:`ptdbench.checkpoints.state.collect` returns them.
            model: The options of the model.
            facts: JSON; those of rank 0 are saved. A function is called at once, on rank 0 only.
        """
        started = time.perf_counter()
        self.wait()
        prepared = _tried(lambda: (self._staged(self._shares.select(tensors)), self._facts(facts)))
        self._begin(lambda: self._save(step, prepared, model))
        self.stall_seconds.append(time.perf_counter() - started)

    def judged(self, step: int, facts: Facts, is_best: bool) -> None:
        """Add what was found out about saved weights to their checkpoint; called in all ranks, between two steps.

        Nothing happens where their save has failed.

        Args:
            step: That of the last save, which may go on.
            facts: JSON; those of rank 0 replace the earlier ones of the same names.
            is_best: Whether it replaces the best one.
        """
        self._begin(lambda: self._judge(step, facts, is_best))

    def wait(self) -> None:
        """Wait until the last save has succeeded or failed."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last save, and release the group and the memory."""
        self.wait()
        if self._staging:
            self._staging.close()
        dist.destroy_process_group(self.group)

    def _staged(self, tensors: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        return self._staging(tensors) if self._staging else lambda: tensors

    def _facts(self, facts: Facts | Callable[[], Facts]) -> Facts:
        if self._rank > 0:
            return {}
        return facts() if callable(facts) else facts

    def _begin(self, task: Callable[[], None]) -> None:
        """Do something when what was begun before is done: aside, or at once."""
        if self._staging is None:
            task()
            return
        before = self._thread

        def aside() -> None:
            if before:
                before.join()
            _stand_back()
            task()

        # A daemon, so that a run whose peers have died can end.
        self._thread = threading.Thread(target=aside, name="checkpoint", daemon=True)
        self._thread.start()

    def _save(self, step: int, prepared: Future[Prepared], model: Mapping[str, Any]) -> None:
        """Write the prepared tensors to disk, and prune older checkpoints."""
        try:
            self._write(step, prepared, model)
        except Exception as error:  # of this rank, of another, or of the connection to a dead one
            self.problems.append(f"step {step}: not saved: {error}")
            return
        self.saved.append(step)
        self._mark_and_prune(step)

    def _judge(self, step: int, facts: Facts, is_best: bool) -> None:
        def note() -> None:
            if shelf.amend(self._run_directory, step, facts) and is_best:
                self.best = step

        self._tidy(step, "its evaluation could not be noted", note)
        if is_best:
            self._mark_and_prune(step)

    def _mark_and_prune(self, step: int) -> None:
        """Mark the best checkpoint, and prune older ones."""
        self._tidy(step, "the best checkpoint could not be marked", self._mark_best)
        self._tidy(
            step,
            "older checkpoints could not be deleted",
            lambda: shelf.prune(self._run_directory, self._keep, self.best),
        )

    def _tidy(self, step: int, fault: str, task: Callable[[], object]) -> None:
        try:
            self._on_rank_0(task)
        except Exception as error:
            self.problems.append(f"step {step}: saved, but {fault}: {error}")

    def _mark_best(self) -> None:
        if self.best is not None:
            shelf.mark_best(self._run_directory, self.best)

    def _write(self, step: int, prepared: Future[Prepared], model: Mapping[str, Any]) -> None:
        """Write a complete checkpoint; if one rank fails all do, and nothing is left.

        Raises:
            _Failed: In all ranks.
        """
        tensors, facts = self._together(lambda: _copied(prepared.result()))
        partial = shelf.partial(self._run_directory, step)
        try:
            self._on_rank_0(lambda: shelf.begin(partial))
            self._together(lambda: _write_tensors(partial, tensors, self.group))
            files: dict[str, Stamp] = {}
            for of_rank in gathered(self._together(lambda: _stamps(partial, self._rank)), self.group):
                files |= of_rank
            written = Manifest(step, self._world_size, model, facts, files, torch.__version__, time.time())
            self._on_rank_0(lambda: _finish(partial, written))
        except _Failed:  # no rank is writing any more
            if self._rank == 0:
                with suppress(OSError):  # the next start retries
                    shelf.discard(partial)
            raise

    def _on_rank_0(self, task: Callable[[], object]) -> None:
        self._together(task if self._rank == 0 else lambda: None)

    def _together(self, task: Callable[[], T]) -> T:
        """Run ``task`` in all ranks and return this rank's result.

        Raises:
            _Failed: It failed in one, or in several; in all ranks.
        """
        done = _tried(task)
        error = done.exception()
        mine = _told(self._rank, error) if error else None
        faults = dict.fromkeys(fault for fault in gathered(mine, self.group) if fault)
        if faults:
            raise _Failed("; ".join(faults))
        return done.result()


class _Failed(Exception):
    """A save failed; the message names the ranks and their errors."""


def _tried(task: Callable[[], T]) -> Future[T]:
    """The result of ``task`` or its error, as a future."""
    done: Future[T] = Future()
    try:
        done.set_result(task())
    except Exception as error:
        done.set_exception(error)
    return done


def _told(rank: int, error: BaseException) -> str:
    return str(error) if isinstance(error, _Failed) else f"rank {rank}: {type(error).__name__}: {error}"


def _copied(prepared: Prepared) -> tuple[dict[str, Tensor], Facts]:
    copies, facts = prepared
    return copies(), facts


def _write_tensors(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write this rank's file and, on rank 0, the metadata, and sync them to disk.

    Raises:
        _Failed: It failed in one of them.
    """
    # Nothing is copied ahead: the tensors are on the CPU, or the caller waits for each anyhow.
    writer = dcp.FileSystemWriter(directory, sync_files=True, single_file_per_rank=True, per_thread_copy_ahead=0)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as failure:
        raise _Failed(reading.why(failure)) from None


def _stamps(directory: Path, rank: int) -> dict[str, Stamp]:
    """Sizes and checksums of the files that ``rank`` wrote."""
    mine = [path for path in directory.iterdir() if path.name.startswith(f"__{rank}_")]
    mine += [directory / reading.METADATA] if rank == 0 else []
    return {path.name: manifest.stamp(path) for path in mine}


def _finish(partial: Path, written: Manifest) -> None:
    manifest.write(partial, written)
    shelf.publish(partial)


def _stand_back() -> None:
    """Lower this thread's CPU and I/O priority, and let it run on every core that the process was given."""
    with suppress(OSError):
        cores.unbind_thread()
    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.get_native_id()
        with suppress(OSError, psutil.Error):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
            psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, 7)
