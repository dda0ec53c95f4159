"""A process whose work is done ends within seconds, whatever a model of the user's own has left running in it.

Python waits for threads that are no daemons, and for what is registered to run at exit, without a limit. And it
destroys what is left of torch's process groups: the destructor of an NCCL group aborts its communicators, which may
wait for a kernel that waits for a peer that has failed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

#: Seconds that threads and what runs at exit have.
SECONDS = 5.0

_listeners: list[Callable[[str], None]] = []


def on_forced_exit(listener: Callable[[str], None]) -> None:
    """Call ``listener`` from now on with the reason why this process had to be ended, if it had to be."""
    _listeners[:] = [listener]


def exit_soon() -> None:
    """End this process a few seconds from now, if it still lives then; call it where nothing is left to do.

    At once where it fails while it has a process group: only a run that ends well destroys it. The exit status is that
    of the exception in flight: call it in a ``finally``.
    """
    error = sys.exc_info()[1]
    status = _status(error)
    distributed = sys.modules.get("torch.distributed")
    if status and distributed and distributed.is_available() and distributed.is_initialized():
        if not isinstance(error, SystemExit):
            traceback.print_exc()  # as Python would
        logging.shutdown()
        _flush()
        os._exit(status)
    threading.Thread(target=_leave, args=(status,), daemon=True, name="leaving").start()


def _status(error: BaseException | None) -> int:
    """Return what Python would end with."""
    if not isinstance(error, SystemExit):
        return int(error is not None)
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _leave(status: int) -> None:
    time.sleep(SECONDS)
    try:
        _explain()
    finally:
        os._exit(status)


def _explain() -> None:
    living = [thread.name for thread in threading.enumerate() if not thread.daemon]
    threads = ", ".join(name for name in living if name != threading.main_thread().name)
    kept = f"these threads still ran: {threads}" if threads else "what runs at exit did not return"
    message = f"process {os.getpid()} was ended {SECONDS:g} s after its work was done: {kept}"
    for listener in _listeners:
        with suppress(OSError):
            listener(message)
    _flush()
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def _flush() -> None:
    """Write out what Python would have written out when it ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
