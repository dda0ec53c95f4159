"""Batches of one rank from a stream of samples, prefetched by worker processes, or by a thread beside a GPU."""

from __future__ import annotations

import gc
import itertools
import signal
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import util
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ptdbench.data.protocol import Batch, Data, read
from ptdbench.launch.lifetime import die_with_parent

#: Batches that each worker process, or the thread, keeps ready.
AHEAD = 2


class Feed:
    """Supplies batches, made by worker processes if the data ask for them, else by this process.

    For a GPU, a thread of this process makes and pins them ahead, so that the device does not wait for it. On a CPU,
    where a thread would take the step's own cores, they are made when asked for. The result is the same in all cases:
    a sample is a function of its number.

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
        """Return inputs and targets of a step, on the device; to be called in the order of steps."""
        started = time.perf_counter()
        batch = self._next_batch(step)
        self.wait_seconds.append(time.perf_counter() - started)
        return self._moved(batch)

    def forget(self) -> None:
        """Discard the waiting times recorded so far."""
        self.wait_seconds.clear()

    def peek(self, step: int) -> Batch:
        """Return the batch of a step, on the device, without advancing or timing."""
        return self._moved(self._batches[step])

    def close(self) -> None:
        """End the worker processes or the thread."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _next_batch(self, step: int) -> Batch:
        on_gpu = self._device.type == "cuda"
        if not self._workers and not on_gpu:
            return self._batches[step]
        if self._ahead is None or self._next != step:
            self.close()
            self._ahead = (
                _by_workers(self._batches, step, self._workers, pinned=on_gpu)
                if self._workers
                else _by_thread(self._batches, step, self._device)
            )
        self._next = step + 1
        return next(self._ahead)

    def _moved(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        inputs, targets = (tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in batch)
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)


def _belong_to_the_rank(_: int) -> None:
    """Ignore signals in a worker, which its rank handles, and die silently with the rank.

    torchrun and SLURM signal all processes of a job, and a worker that ended would also end its rank, which may be
    about to save. Garbage of the rank is left alone: a TCPStore among it would join a thread that a fork does not have,
    which can end the worker by SIGSEGV.
    """
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()  # where the kernel does not do that, torch has a look every few seconds


class _Batches(Dataset[Batch]):
    """Maps a step to this rank's share of its batch."""

    def __init__(self, data: Data, rows: Callable[[int], tuple[int, int]]) -> None:
        self._data = data
        self._rows = rows
        self._example = data.example()

    def __getitem__(self, step: int) -> Batch:
        return read(self._data, *self._rows(step), self._example)


def _by_workers(batches: _Batches, first: int, count: int, pinned: bool) -> Generator[Batch, None, None]:
    """Batches from step ``first`` on, made in ``count`` processes, which end with it."""
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=itertools.count(first),  # type: ignore[arg-type] # endless, and never asked for its length
        num_workers=count,
        prefetch_factor=AHEAD,
        pin_memory=pinned,  # in a thread of this process
        # Forked by the rank, to die with it: those of a server that forks for it would outlive it for ever.
        multiprocessing_context="fork",
        worker_init_fn=_belong_to_the_rank,
        # Its own, so that the rank's stays where a run without workers has it.
        generator=torch.Generator(),
    )
    made: Any = iter(loader)
    # As they leave signals to the rank, a rank that ends without close() would wait for them for ever.
    util.Finalize(None, made._shutdown_workers, exitpriority=100)
    try:
        yield from made
    finally:  # by hand: the traceback of a step that has failed may hold the iterator for as long as the rank lives
        made._shutdown_workers()


def _by_thread(batches: _Batches, first: int, device: torch.device) -> Generator[Batch, None, None]:
    """Batches from step ``first`` on, made and pinned for ``device`` in a thread, which ends with it."""

    def pinned(step: int) -> Batch:
        inputs, targets = batches[step]
        return inputs.pin_memory(), targets.pin_memory()

    # A thread begins on device 0, where pinning would create a context.
    thread = ThreadPoolExecutor(1, "batches", initializer=torch.cuda.set_device, initargs=(device,))
    made: deque[Future[Batch]] = deque()
    try:
        for step in itertools.count(first):
            made.append(thread.submit(pinned, step))
            if len(made) > AHEAD:
                yield made.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)
