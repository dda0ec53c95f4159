"""Saving during training: each rank copies its share of the tensors, and a thread writes the copies."""

import os
import threading
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import StateDictStager
from torch.distributed.tensor import DTensor

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest, Stamp
from ptdbench.checkpoints.state import METADATA, errors_in
from ptdbench.files import lack_of_space
from ptdbench.launch import rendezvous, settings
from ptdbench.launch.collect import gather
from ptdbench.local_part import local_part


class Shares:
    """Selects the tensors that this rank saves, so that each is saved once and the bytes are balanced over ranks.

    As torch's planner does it, but before tensors are copied: a rank copies only what it saves.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._plan: SavePlan | None = None
        self._names: set[str] = set()

    def select(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's share of ``tensors``; called in all ranks, each with all its tensors."""
        plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
        if any(gather(plan != self._plan, self._group)):  # true at the first save, rarely later
            self._plan = plan
            mine = dedup_save_plans(gather(plan, self._group))[dist.get_rank(self._group)]
            self._names = {item.index.fqn for item in mine.items}
        return {name: tensor for name, tensor in tensors.items() if name in self._names}


class Staging:
    """Copies tensors into memory that is reused between calls, because allocating takes longer than copying.

    For a GPU the memory is pinned, so that copies are asynchronous and at full speed.
    """

    def __init__(self) -> None:
        self._stager: StateDictStager | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, tensors: Mapping[str, Tensor], steady: Container[str] = ()) -> Callable[[], dict[str, Tensor]]:
        """Start copying; steps queued on the device from now on do not change the copies.

        Args:
            tensors: The tensors, by name.
            steady: Names of tensors that do not change before :meth:`settle`: a GPU copies these during steps.

        Returns:
            A function that waits for the device and returns the copies by name, on the CPU, DTensors as DTensors. The
            next call overwrites them.
        """
        # Only local parts: torch's stager would copy the mesh of each DTensor too.
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        is_on_gpu = _on_gpu(tensors)
        self._stager = self._stager or StateDictStager(pin_memory=is_on_gpu)
        if not is_on_gpu:
            copies = _as_sharded(self._stager.stage(parts), tensors)
            return lambda: copies
        # The host waits for neither: the next step is queued after the first copies, and overlaps the others.
        staged = self._stager.stage({name: part for name, part in parts.items() if name not in steady}, True)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged |= self._stager.stage({name: part for name, part in parts.items() if name in steady}, True)
            copied = torch.cuda.Event()
            copied.record()

        def when_copied(_source: object = tensors) -> dict[str, Tensor]:  # a reference: memory is not reused yet
            copied.synchronize()
            return _as_sharded(staged, tensors)

        return when_copied

    def settle(self) -> None:
        """Let work queued on the device from now on wait for the copies of steady tensors."""
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Release the memory."""
        self._stager = None


def _as_sharded(copies: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of local parts as DTensors where the tensors are."""
    return {
        name: DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor := tensors[name], DTensor) else copy
        for name, copy in copies.items()
    }


def _on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values())


T = TypeVar("T")

Facts = Mapping[str, Any]

#: A function that returns the tensors to save once they are copied.
Prepared = Future[Callable[[], dict[str, Tensor]]]

#: Added to the writing thread's nice value, so that training has priority on the cores.
_NICE = 10


class Saver:
    """Writes a run's checkpoints; created, used and closed in all ranks.

    A save that fails in any rank leaves no checkpoint and adds a line to the :attr:`problems` of every rank; the run
    continues.

    Args:
        run_directory: The run's directory, the same for all ranks.
        keep: Number of complete checkpoints to keep, at least 1.
        asynchronous: Write in a thread; else :meth:`save` makes no copy, and returns when everything is on disk.
        patience: How long ranks wait for each other while they save.
    """

    def __init__(
        self, run_directory: Path, *, keep: int, asynchronous: bool = True, patience: timedelta = rendezvous.PATIENCE
    ) -> None:
        #: A CPU group of all ranks. Used by the writing thread; other threads may use it while no save is in progress.
        self.group = cast(dist.ProcessGroup, dist.new_group(timeout=patience, backend="gloo"))  # all ranks
        self.saved: list[int] = []  #: Steps whose checkpoint is on disk, in the order of saving.
        self.problems: list[str] = []  #: One line for each failed save.
        self.broken: set[Path] = set()  #: Directories of broken checkpoints, which do not count until written again.
        self._run_directory = run_directory
        self._keep = keep
        self._rank = dist.get_rank(self.group)
        self._shares = Shares(self.group)
        self._staging = Staging() if asynchronous else None
        self._thread: threading.Thread | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        model: Mapping[str, Any],
        facts: Facts,
        steady: Container[str] = (),
    ) -> None:
        """Save the current values of ``tensors``; called in all ranks, between two steps.

        Wait for the previous save. Ranks may pass different tensors; tensors of the same name must be equal, and are
        written once, by one of the ranks that have it. The ``facts``, in JSON types, are rank 0's. ``steady``: names of
        tensors that do not change before :meth:`settle`, trained weights among them. The save fails if one of these
        weights is not finite.
        """
        self.wait()

        def prepare() -> Callable[[], dict[str, Tensor]]:
            mine = self._shares.select(tensors)
            copied = self._staging(mine, steady) if self._staging else lambda: mine
            return lambda: _require_finite(copied(), steady)

        prepared = _attempt(prepare)
        self._begin(lambda: self._save(step, prepared, model, facts))

    def settle(self) -> None:
        """Let the device wait for the copies of steady tensors, before these change."""
        if self._staging:
            self._staging.settle()

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

    def _begin(self, task: Callable[[], None]) -> None:
        """Run a task in a thread, or at once if not asynchronous."""
        if self._staging is None:
            task()
            return
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def in_background() -> None:
            if device is not None:  # a thread starts on device 0, where waiting for an event may create a context
                torch.cuda.set_device(device)
            _lower_priority()
            task()

        # A daemon, so that a run whose peers have died can end.
        self._thread = threading.Thread(target=in_background, name="checkpoint", daemon=True)
        self._thread.start()

    def _save(self, step: int, prepared: Prepared, model: Mapping[str, Any], facts: Facts) -> None:
        try:
            self._write(step, prepared, model, facts)
        except Exception as error:  # from this rank, from another, or from the connection to a dead one
            self.problems.append(f"step {step}: not saved: {error}")
        else:
            self.saved.append(step)
            try:
                self._on_rank_0(lambda: checkpoint_dir.prune(self._run_directory, self._keep, self.broken))
            except Exception as error:
                self.problems.append(f"step {step}: saved, but cannot delete older checkpoints: {error}")

    def _write(self, step: int, prepared: Prepared, model: Mapping[str, Any], facts: Facts) -> None:
        """Write a complete checkpoint; if one rank fails, all raise _SaveFailed, and nothing is left on disk."""

        def copied() -> dict[str, Tensor]:
            return prepared.result()()

        copies = self._on_all_ranks(copied)
        folder = checkpoint_dir.partial(self._run_directory, step)
        try:
            self._on_rank_0(lambda: checkpoint_dir.begin(folder))
            self._on_all_ranks(lambda: _write_tensors(folder, copies, self.group))
            stamps = gather(self._on_all_ranks(lambda: _stamps(folder, self._rank)), self.group)
            files = {name: stamp for of_rank in stamps for name, stamp in of_rank.items()}
            manifest = Manifest(step, len(stamps), model, facts, files, torch.__version__, time.time())

            def finish() -> None:
                checkpoint_dir.write_manifest(folder, manifest)
                self.broken.discard(checkpoint_dir.publish(folder))

            self._on_rank_0(finish)
        except _SaveFailed:  # no rank is writing any more
            if self._rank == 0:
                with suppress(OSError):  # the next start retries
                    checkpoint_dir.discard(folder)
            raise

    def _on_rank_0(self, task: Callable[[], object]) -> None:
        self._on_all_ranks(task if self._rank == 0 else lambda: None)

    def _on_all_ranks(self, task: Callable[[], T]) -> T:
        """Run ``task`` in all ranks and return this rank's result; if it fails in one, all raise _SaveFailed."""
        outcome = _attempt(task)
        error = outcome.exception()
        mine = f"rank {self._rank}: {type(error).__name__}: {error}" if error else None
        mine = str(error) if isinstance(error, _SaveFailed) else mine  # its message already names the ranks
        if faults := dict.fromkeys(filter(None, gather(mine, self.group))):
            raise _SaveFailed("; ".join(faults))
        return outcome.result()


class _SaveFailed(Exception):
    """A save failed, with the ranks and their errors."""


def _require_finite(tensors: dict[str, Tensor], steady: Container[str]) -> dict[str, Tensor]:
    """Return the tensors; raise if a weight is not finite: it would replace a good checkpoint by a useless one."""
    for name, tensor in tensors.items():
        if name.startswith("model.") and name in steady and not local_part(tensor).sum(dtype=torch.float32).isfinite():
            raise FloatingPointError(f"{name} is not finite")
    return tensors


def _attempt(task: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(task())
    except Exception as error:
        done.set_exception(error)
    return done


class _Writer(dcp.FileSystemWriter):
    """torch's writer, with the cause of a full disk: torch reports only that the file was closed."""

    def write_data(self, *arguments: Any) -> Any:
        try:
            return super().write_data(*arguments)
        except Exception as error:
            raise lack_of_space(error) or error from error


def _write_tensors(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write this rank's file and, on rank 0, the metadata, and sync them; raise _SaveFailed if any rank fails."""
    # Nothing is copied ahead: the tensors are on the CPU, or the caller waits for each anyway.
    writer = _Writer(directory, sync_files=True, single_file_per_rank=True, per_thread_copy_ahead=0)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as failure:
        raise _SaveFailed(errors_in(failure)) from None


def _stamps(directory: Path, rank: int) -> dict[str, Stamp]:
    mine = [path for path in directory.iterdir() if path.name.startswith(f"__{rank}_")]
    mine += [directory / METADATA] if rank == 0 else []
    return {path.name: checkpoint_dir.stamp(path) for path in mine}


def _lower_priority() -> None:
    """Lower this thread's CPU and I/O priority, and let it run on every core of the process."""
    with suppress(OSError):
        settings.unbind_thread()
    thread = threading.get_native_id()
    with suppress(OSError, psutil.Error):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
        psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_BE, 7)
