"""Graceful stop: the rank that receives a stop signal records it, and all ranks stop after the same step."""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.launch import local, rendezvous

#: Approximate seconds between two checks: short against a cluster's grace period, long against a step.
EVERY_SECONDS = 0.5


class StopSignal:
    """Records this rank's stop signals, and reports them to all ranks after the same step.

    A handler may interrupt the rank anywhere, even inside a collective, so it only records the signal. The ranks
    compare their signals between two steps, which costs an all-reduce, and therefore about every ``every_seconds``
    only. They also agree on the number of steps until the next check: clocks differ, and ranks that decided by
    themselves would wait for each other in different steps.

    All ranks enter it, each in its main thread, while the default process group exists. Leaving it restores the
    previous handlers, or ignores stop signals if it has reported one: a person who presses Ctrl-C reaches the ranks
    twice, at once and through their launcher. Its own group is destroyed with the default group, as destroying a group
    that has lost a peer may block forever.

    Args:
        every_seconds: Seconds between two checks; 0 checks after every step.
    """

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
        self._number = 0
        self._next_check = 0
        self._checked_step: int | None = None
        self._reported = False
        self._handling = local.handling(self._note)

    def __enter__(self) -> StopSignal:
        # gloo, on GPUs too: a flag in device memory would have to wait for the steps in the device's queue.
        made = dist.new_group(backend="gloo", timeout=rendezvous.PATIENCE)
        assert isinstance(made, dist.ProcessGroup)  # all ranks are in it
        self._group = made
        self._handling.__enter__()
        self._checked_at = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handling.__exit__(kind, error, trace)
        if self._reported:
            local.ignore_signals()

    def received(self, done: int) -> str | None:
        """Whether to stop now; every rank calls it between two steps and gets the same answer.

        Args:
            done: Number of finished steps; the same on all ranks.

        Returns:
            The name of a signal that some rank received, else ``None``; also if no check is due, which costs one
            comparison of integers.
        """
        return None if done < self._next_check else self._check(done)

    def _check(self, done: int) -> str | None:
        steps = 1 if self._checked_step is None else max(done - self._checked_step, 1)
        mine = (self._number, (time.perf_counter() - self._checked_at) / steps)
        agreed = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        number, seconds_per_step = agreed.tolist()
        # On a GPU the first steps seem to take no time, until its queue is full: the distance at most doubles.
        self._next_check = done + max(1, min(2 * steps, int(self._every_seconds / max(seconds_per_step, 1e-9))))
        self._checked_step, self._checked_at = done, time.perf_counter()
        self._reported = bool(number)
        return signal.Signals(int(number)).name if number else None

    def _note(self, number: int, _: Any) -> None:
        self._number = self._number or number
