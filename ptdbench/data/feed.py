"""Batches of one rank from a stream of samples, prefetched by worker processes, or for a GPU by a thread."""

import gc
import itertools
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import util
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ptdbench.data.protocol import Batch, Data, read
from ptdbench.launch.lifetime import die_with_parent
from ptdbench.nested import map_tensors, tensors
from ptdbench.units import size_text

#: Batches that each worker process, or the thread, keeps ready.
AHEAD = 2


class Feed:
    """Supplies batches, made by worker processes if the data request them, else by this process.

    For a GPU, a thread of this process makes and pins batches ahead, so that the device does not wait for them. On a
    CPU, where a thread would compete with the step for cores, they are made on demand. Samples are always the same, as
    functions of their numbers.

    Args:
        data: The data, prepared.
        rows: Returns the samples ``(start, stop)`` of this rank's share of a step.
        device: The device of the batches.
    """

    def __init__(self, data: Data, rows: Callable[[int], tuple[int, int]], device: torch.device) -> None:
        self.wait_seconds: list[float] = []  #: How long each call since the last :meth:`forget` waited for its batch.
        self._batches = _Batches(data, rows)
        self._workers = data.workers
        self._device = device
        self._ahead: Generator[Batch, None, None] | None = None
        self._next = 0

    def __call__(self, step: int) -> Batch:
        """Return inputs and targets of a step, on the device; call it in the order of steps."""
        started = time.perf_counter()
        batch = self._next_batch(step)
        self.wait_seconds.append(time.perf_counter() - started)
        return self.to_device(batch)

    def forget(self) -> None:
        """Discard the waiting times recorded so far."""
        self.wait_seconds.clear()

    def peek(self, step: int) -> Batch:
        """Return the batch of a step, on the device, without advancing or timing."""
        return self.to_device(self._batches[step])

    def to_device(self, batch: Batch) -> Batch:
        """Return a batch on the device; on a GPU, its copy from pinned memory is queued."""
        if self._device.type == "cpu":
            return batch

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self._device, non_blocking=True)

        return map_tensors(copied, batch)

    def close(self) -> None:
        """Stop the worker processes or the thread."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _next_batch(self, step: int) -> Batch:
        on_gpu = self._device.type == "cuda"
        if not self._workers and not on_gpu:
            return self._batches[step]
        if self._ahead is None or self._next != step:
            self.close()
            if self._workers:
                self._ahead = _by_workers(self._batches, step, self._workers, pinned=on_gpu)
            else:
                self._ahead = _by_thread(self._batches, step, self._device)
        self._next = step + 1
        return next(self._ahead)


def _init_worker(_: int) -> None:
    """Ignore signals in a worker, as its rank handles them, and die silently with the rank.

    torchrun and SLURM signal all processes of a job, and a worker that exits would end its rank, which may be about to
    save. The rank's garbage is frozen: collecting a TCPStore would join a thread that a fork does not have, and may
    crash with SIGSEGV.
    """
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()  # if the kernel does not support that, torch polls every few seconds


class _Batches(Dataset[Batch]):
    """Maps a step to this rank's share of its batch."""

    def __init__(self, data: Data, rows: Callable[[int], tuple[int, int]]) -> None:
        self._data = data
        self._rows = rows
        self._example = data.example()

    def __getitem__(self, step: int) -> Batch:
        batch = read(self._data, *self._rows(step), self._example)
        return batch if get_worker_info() is None else _shared(batch)


def _shared(batch: Batch) -> Batch:
    """Move a batch to shared memory; torch's own thread would lose the error if there is too little."""
    try:
        for tensor in tensors(batch):
            tensor.share_memory_()
    except RuntimeError as error:
        needed, free = sum(tensor.nbytes for tensor in tensors(batch)), shutil.disk_usage("/dev/shm").free
        rule = f"a batch of {size_text(needed)} does not fit into the {size_text(free)} of free shared memory"
        remedy = f"try data.workers=0, or docker run --shm-size, for {AHEAD} batches per worker"
        raise OSError(f"{rule}: {remedy} ({error})") from None
    return batch


def _by_workers(batches: _Batches, first: int, count: int, pinned: bool) -> Generator[Batch, None, None]:
    """Yield batches from step ``first`` on, made in ``count`` processes that stop with the generator."""
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=itertools.count(first),  # type: ignore[arg-type] # endless; its length is never used
        num_workers=count,
        prefetch_factor=AHEAD,
        pin_memory=pinned,  # in a thread of this process
        # Forked by the rank, to die with it: children of a fork server would outlive it.
        multiprocessing_context="fork",
        worker_init_fn=_init_worker,
        # A separate generator, so that the rank's random state is the same as in a run without workers.
        generator=torch.Generator(),
    )
    iterator: Any = iter(loader)
    # Workers ignore signals, so a rank that exits without close() would wait for them forever.
    util.Finalize(None, iterator._shutdown_workers, exitpriority=100)
    try:
        yield from iterator
    finally:  # explicitly, as the traceback of a failed step may keep the iterator alive as long as the rank
        iterator._shutdown_workers()


def _by_thread(batches: _Batches, first: int, device: torch.device) -> Generator[Batch, None, None]:
    """Yield batches from step ``first`` on, made and pinned for ``device`` in a thread that stops with it."""

    def pinned(step: int) -> Batch:
        return map_tensors(torch.Tensor.pin_memory, batches[step])

    # A thread starts on device 0, where pinning would create a context.
    thread = ThreadPoolExecutor(1, "batches", initializer=torch.cuda.set_device, initargs=(device,))
    pending: deque[Future[Batch]] = deque()
    try:
        for step in itertools.count(first):
            pending.append(thread.submit(pinned, step))
            if len(pending) > AHEAD:
                yield pending.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)
