"""How a run stops in an orderly way: a signal is noted by the rank that gets it, and all ranks act on it together."""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.launch import local, rendezvous

#: Seconds between two checks, about: little beside the time that a cluster gives, and rare beside the steps.
EVERY_SECONDS = 0.5


class Brake:
    """Takes this rank's stop signals, and tells all ranks after the same step that one of them got one.

    A handler interrupts the rank anywhere, also in the middle of a collective, so that it can only take a note. The
    notes are compared between two steps, which costs a message round; therefore not after every step, but about
    every ``every_seconds``. How many steps that are is part of what the ranks agree on: each of them has a clock of
    its own, and ranks that decided alone when to compare would wait for each other in different steps.

    To be entered by all ranks, each in its main thread, while the default process group is there. Leaving it gives the
    signals back to who had them; the group that it made goes with the default group, since a group that has lost a
    peer may wait for it for ever.

    Args:
        every_seconds: The time between two checks; 0 checks after every step.
    """

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
        self._number = 0
        self._next_check = 0
        self._checked_step: int | None = None
        self._handling = local.handling(self._note)

    def __enter__(self) -> Brake:
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

    def pressed(self, done: int) -> str | None:
        """Whether to stop now; every rank asks between two steps and gets the same answer.

        Args:
            done: How many steps are finished; the same number on all ranks.

        Returns:
            The name of the signal that some rank got, else ``None``; also where it is not time to compare, which costs
            one comparison of integers.
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
        return signal.Signals(int(number)).name if number else None

    def _note(self, number: int, _: Any) -> None:
        self._number = self._number or number
