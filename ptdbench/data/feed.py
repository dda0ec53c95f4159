"""Batches of one rank from a stream of samples, prefetched by worker processes if needed."""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ptdbench.data.protocol import Data

Batch = tuple[Tensor, Tensor]

#: Batches that each worker process keeps ready.
AHEAD = 2

#: prctl(2): the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # here, as a process that was forked should load nothing


class Feed:
    """Supplies batches, made by this process or by worker processes, depending on the data.

    The result is the same in both cases: a sample is a function of its number.

    Attributes:
        wait_seconds: How long each call since the last :meth:`forget` waited for its batch.

    Args:
        data: The data, prepared.
        rows: Returns the samples ``(start, stop)`` of this rank's share of a step.
        device: The device of the batches.
    """

    def __init__(self, data: Data, rows: Callable[[int], tuple[int, int]], device: torch.device) -> None:
        self.wait_seconds: list[float] = []
        self._batches = _Batches(data, rows)
        self._workers = data.workers
        self._device = device
        self._made: Any = None  # torch's iterator over what the workers make
        self._next = 0

    def __call__(self, step: int) -> Batch:
        """Inputs and targets of a step, on the device; to be called in the order of steps."""
        started = time.perf_counter()
        if not self._workers:
            batch = self._batches[step]
        else:
            if self._made is None or self._next != step:
                self._made = self._start(step)
            batch, self._next = next(self._made), step + 1
        self.wait_seconds.append(time.perf_counter() - started)
        return self._moved(batch)

    def forget(self) -> None:
        """Discard the waiting times recorded so far."""
        self.wait_seconds.clear()

    def peek(self, step: int) -> Batch:
        """The batch of a step, on the device, without advancing or timing."""
        return self._moved(self._batches[step])

    def close(self) -> None:
        """End the worker processes."""
        made, self._made = self._made, None
        if made is not None:
            # By hand: the traceback of a step that has failed may hold it for as long as the rank lives.
            made._shutdown_workers()

    def _start(self, step: int) -> Any:
        loader = DataLoader(
            self._batches,
            batch_size=None,
            sampler=itertools.count(step),  # type: ignore[arg-type] # endless, and never asked for its length
            num_workers=self._workers,
            prefetch_factor=AHEAD,
            pin_memory=self._device.type == "cuda",
            # Forked by the rank, to die with it: those of a server that forks for it would outlive it for ever.
            multiprocessing_context="fork",
            worker_init_fn=_belong_to_the_rank,
            # Its own, so that the rank's stays where a run without workers has it.
            generator=torch.Generator(),
        )
        made: Any = iter(loader)
        # As they leave signals to the rank, a rank that ends without close() would wait for them for ever.
        util.Finalize(None, made._shutdown_workers, exitpriority=100)
        return made

    def _moved(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        inputs, targets = (tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in batch)
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)


def _belong_to_the_rank(_: int) -> None:
    """In a worker: ignore signals, which its rank handles, and die silently with the rank.

    torchrun and SLURM signal all processes of a job, and a worker that ended would also end its rank, which may be
    about to save.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if _LIBC:  # elsewhere torch has a look every few seconds
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Batches(Dataset[Batch]):
    """Maps a step to this rank's share of its batch."""

    def __init__(self, data: Data, rows: Callable[[int], tuple[int, int]]) -> None:
        self._data = data
        self._rows = rows

    def __getitem__(self, step: int) -> Batch:
        return self._data.samples(*self._rows(step))
