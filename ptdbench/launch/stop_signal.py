"""Stop signals: all ranks stop after the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ptdbench.launch import collect, local

#: Errors that end a run in their own way, whatever signal has arrived.
_OF_THEIR_OWN = (MemoryError, FloatingPointError, torch.OutOfMemoryError)


#: Approximate seconds between two checks: short compared with a cluster's grace period, long compared with a step.
CHECK_SECONDS = 0.5


class StopSignal:
    """Records this rank's stop signals, and reports them to all ranks after the same step.

    A handler may interrupt the rank anywhere, even inside a collective, so it only records the signal. The ranks
    compare their signals between two steps. As that costs an all-reduce, they do so only about every
    :data:`CHECK_SECONDS`. They also agree on the number of steps until the next check: clocks differ, and ranks that
    decided on their own would wait for each other in different steps. Long operations between two steps are checked in
    the same way, with a separate count.

    A rank that fails between a signal and that step raises :class:`ptdbench.launch.local.Stopped`: Ctrl-C also ends the
    compilers that it waits for, and their failure is not how the run ended. Running out of memory and diverging are.

    All ranks enter it, each in its main thread, while the default process group exists. On exit it restores the
    previous handlers, or ignores stop signals if it has reported one: Ctrl-C reaches the ranks twice, directly and
    through their launcher.
    """

    def __init__(self) -> None:
        self._number = 0
        self._agreed: str | None = None
        self._handling = local.handling(self._note)

    def __enter__(self) -> StopSignal:
        self._handling.__enter__()
        self._steps = _Pace()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._handling.__exit__(kind, error, trace)
        if self._agreed:
            local.ignore_signals()
        elif self._number and isinstance(error, Exception) and not isinstance(error, _OF_THEIR_OWN):
            raise local.Stopped(self._number) from error

    def received(self, done: int) -> str | None:
        """Return the name of a signal that some rank received, or ``None``; called on every rank between two steps.

        If no check is due, this costs only an integer comparison and returns ``None``. All ranks get the same answer.
        """
        return self._ask(self._steps, done)

    def meanwhile(self) -> Callable[[int], str | None]:
        """Return a :meth:`received` for the parts of an operation between two steps, such as an evaluation's batches.

        Once the ranks have agreed to stop, it returns the signal at once on each of them.
        """
        return partial(self._ask, _Pace())

    def _ask(self, pace: _Pace, done: int) -> str | None:
        if self._agreed is None and done >= pace.next_check:
            number, seconds = collect.most(self._number, pace.seconds(done))
            pace.checked(done, seconds)
            self._agreed = signal.Signals(int(number)).name if number else None
        return self._agreed

    def _note(self, number: int, _: Any) -> None:
        self._number = self._number or number


class _Pace:
    """The duration of steps or other units of work, and the number of them until the next check."""

    def __init__(self) -> None:
        self.next_check = 0
        self._last: int | None = None
        self._at = time.perf_counter()

    def seconds(self, done: int) -> float:
        """Return this rank's seconds per unit since the last check."""
        return (time.perf_counter() - self._at) / self._since(done)

    def checked(self, done: int, seconds: float) -> None:
        """Note a check in which all ranks have agreed on these ``seconds``."""
        # On a GPU the first steps seem to take no time until its queue is full, so the interval at most doubles.
        self.next_check = done + max(1, min(2 * self._since(done), int(CHECK_SECONDS / max(seconds, 1e-9))))
        self._last, self._at = done, time.perf_counter()

    def _since(self, done: int) -> int:
        return 1 if self._last is None else max(done - self._last, 1)
