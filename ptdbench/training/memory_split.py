"""Memory of a step by purpose, from an extra step in which the profiler records allocations."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import record_function

from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.local_part import plain_tensors
from ptdbench.profiling import allocations
from ptdbench.profiling.allocations import Usage
from ptdbench.profiling.phases import KINDS
from ptdbench.records.schema import Memory
from ptdbench.terminal import echo
from ptdbench.training import profile, virtual_account
from ptdbench.training.loop import StepLoop

#: The folder in a run's directory with a snapshot of each rank's GPU memory, with ``profile.trace``.
FOLDER = "memory"

#: Maximum number of allocations in a snapshot of a GPU's memory.
_ENTRIES = 200_000


def split(job: Job, loop: StepLoop) -> Memory | None:
    """Split the memory of a step by purpose, at the end of a run; called in all ranks. ``None`` except on rank 0."""
    state: dict[int, tuple[str, int]] = {}
    keeps = job.spec.config.profile.trace and job.device.type == "cuda"
    with job.display.during("profiling memory"):
        with _snapshot(job) if keeps else nullcontext():
            recording = profile.run(job, loop, 1, memory=True, between=partial(_note, state, loop, job.device.type))
        with job.watchdog.paused():
            usage = _usage(recording, state, job.device.type)
            if reason := profile.reason_of_any(usage):
                return Memory(reason=reason)
            assert not isinstance(usage, str)
            of_ranks: list[Usage] = gather(max(usage, key=lambda moment: moment.total))
    if not job.world.is_first:
        return None
    peaks = [of_ranks[rank] for rank in virtual_account.present(job)]
    return Memory(
        ranks={kind: [peak.bytes[kind] for peak in peaks] for kind in KINDS},
        moments=[peak.moment for peak in peaks],
    )


def _usage(recording: Any, state: dict[int, tuple[str, int]], device_type: str) -> list[Usage] | str:
    """Return the memory of the step, or why it is unknown: a failure must not cost the phases too."""
    try:
        return allocations.usage(allocations.read(recording, device_type), state)
    except Exception as error:  # torch's tree of events is not a public interface
        return f"cannot read the profiler's allocations: {type(error).__name__}: {error}"


def _note(state: dict[int, tuple[str, int]], loop: StepLoop, device_type: str) -> None:
    """Note the kind and the bytes of each storage of the training state, by address."""
    state.clear()
    with record_function(allocations.INVENTORY):
        for kind, tensors in _state(loop).items():
            for storage in (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor)):
                if storage.device.type == device_type:
                    state.setdefault(storage.data_ptr(), (kind, storage.nbytes()))


def _state(loop: StepLoop) -> dict[str, Iterable[Any]]:
    """Return the tensors that live across steps, and the gradients, by kind."""
    weights = list(loop.engine.module.parameters())
    copies = [copy for part in loop.engine.parts if part.copies for copy in part.copies.tensors]
    return {
        "weights": [*weights, *loop.engine.module.buffers(), *copies],
        "gradients": [weight.grad for weight in weights],
        "optimizer": [
            value
            for values in loop.update.optimizer.state.values()
            for value in (values.values() if isinstance(values, Mapping) else ())
        ],
    }


@contextmanager
def _snapshot(job: Job) -> Iterator[None]:
    """Write a snapshot of the GPU's memory after the block, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    try:
        yield
        folder = job.directory / FOLDER
        with job.watchdog.paused():
            try:
                folder.mkdir(exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(folder / f"rank{job.world.rank}.pickle"))
            except (OSError, RuntimeError) as error:  # torch symbolizes stacks, which may fail
                echo(f"warning: cannot write the memory snapshot: {error}", sys.stderr)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
