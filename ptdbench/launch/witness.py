"""Notes a stop signal when it arrives, also where the main thread is busy.

Python runs a handler between two of its instructions, and a rank that waits for a peer in a collective comes to none.
Where a launcher then kills it, nobody would know that it was asked to stop.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ptdbench.launch import local


@contextmanager
def noting(note: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile ``note`` is called in a thread with each stop signal that will raise :class:`local.Stopped`.

    Signals that have another handler, such as :class:`ptdbench.launch.stop_signal.StopSignal`, stop nothing by
    themselves and are not noted. To be entered in the main thread.
    """
    here, there = socket.socketpair()
    there.setblocking(False)
    thread = threading.Thread(target=_listen, args=(here, note), daemon=True, name="witness of signals")
    thread.start()
    before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        there.close()  # which ends the thread
        thread.join()
        here.close()


def _listen(arrivals: socket.socket, note: Callable[[int], None]) -> None:
    while numbers := arrivals.recv(64):
        for number in numbers:
            if local.stops(number):
                note(number)
