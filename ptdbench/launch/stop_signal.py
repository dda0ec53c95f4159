"""Stop signals: noted when they arrive; all ranks stop after the same step.

Python runs a handler between two of its instructions, and a rank that waits for a peer in a collective comes to none.
Where a launcher then kills it, nobody would know that it was asked to stop.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ptdbench.launch import collect, local


@contextmanager
def noting_stop_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call ``note`` in a thread with each signal that will raise :class:`ptdbench.launch.local.Stopped`, meanwhile.

    Signals that have another handler, such as :class:`StopSignal`, stop nothing by themselves and are not noted. To be
    entered in the main thread.
    """
    here, there = socket.socketpair()
    there.setblocking(False)

    def listen() -> None:
        while numbers := here.recv(64):
            for number in numbers:
                if local.stops(number):
                    note(number)

    thread = threading.Thread(target=listen, daemon=True, name="witness of signals")
    thread.start()
    before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        there.close()  # which ends the thread
        thread.join()
        here.close()


#: Approximate seconds between two checks: short against a cluster's grace period, long against a step.
EVERY_SECONDS = 0.5


class StopSignal:
    """Records this rank's stop signals, and reports them to all ranks after the same step.

    A handler may interrupt the rank anywhere, even inside a collective, so it only records the signal. The ranks
    compare their signals between two steps, which costs an all-reduce, and therefore about every ``every_seconds``
    only, or after every step if that is 0. They also agree on the number of steps until the next check: clocks differ,
    and ranks that decided by themselves would wait for each other in different steps. What takes long between two steps
    is checked in the same way, by a count of its own.

    All ranks enter it, each in its main thread, while the default process group exists. Leaving it restores the
    previous handlers, or ignores stop signals if it has reported one: a person who presses Ctrl-C reaches the ranks
    twice, at once and through their launcher.
    """

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
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

    def received(self, done: int) -> str | None:
        """Return the name of a signal that some rank received, else ``None``; called on every rank between two steps.

        If no check is due, which costs one comparison of integers, it is ``None`` too. All ranks get the same answer.
        """
        return self._ask(self._steps, done)

    def meanwhile(self) -> Callable[[int], str | None]:
        """A :meth:`received` for the parts of what is done between two steps, such as the batches of an evaluation.

        Once ranks have agreed to stop, each of them says so at once.
        """
        return partial(self._ask, _Pace())

    def _ask(self, pace: _Pace, done: int) -> str | None:
        if self._agreed is None and done >= pace.next_check:
            number, seconds = collect.most(self._number, pace.seconds(done))
            pace.checked(done, seconds, self._every_seconds)
            self._agreed = signal.Signals(int(number)).name if number else None
        return self._agreed

    def _note(self, number: int, _: Any) -> None:
        self._number = self._number or number


class _Pace:
    """The duration of steps, or of other parts of a whole, and after how many of them the next check is due."""

    def __init__(self) -> None:
        self.next_check = 0
        self._last: int | None = None
        self._at = time.perf_counter()

    def seconds(self, done: int) -> float:
        """Seconds of each since the last check, on this rank."""
        return (time.perf_counter() - self._at) / self._since(done)

    def checked(self, done: int, seconds: float, every_seconds: float) -> None:
        """Note a check, in which all ranks have agreed on these ``seconds``."""
        # On a GPU the first steps seem to take no time, until its queue is full: the distance at most doubles.
        self.next_check = done + max(1, min(2 * self._since(done), int(every_seconds / max(seconds, 1e-9))))
        self._last, self._at = done, time.perf_counter()

    def _since(self, done: int) -> int:
        return 1 if self._last is None else max(done - self._last, 1)
