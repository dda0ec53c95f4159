"""Forced exit: a process whose work is done ends within seconds, whatever a user's model has left running in it.

Python waits indefinitely for non-daemon threads and exit handlers. It also destroys torch's remaining process groups:
the destructor of an NCCL group aborts its communicators, which may wait for a kernel that waits for a failed peer.
"""

import logging
import os
import sys
import threading
import time
import traceback
from contextlib import suppress

#: Seconds that threads and exit handlers have.
SECONDS = 5.0


def exit_soon() -> None:
    """Force this process to exit a few seconds from now, unless it does so itself; call it when no work is left.

    It exits at once if it fails while it has a process group: only a successful run destroys its group. The exit status
    follows from the exception in flight: call this in a ``finally``.
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
    """Return the exit status that Python would use."""
    if not isinstance(error, SystemExit):
        return int(error is not None)
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _leave(status: int) -> None:
    time.sleep(SECONDS)
    try:
        living = [thread.name for thread in threading.enumerate() if not thread.daemon]
        threads = ", ".join(name for name in living if name != threading.main_thread().name)
        kept = f"these threads were still running: {threads}" if threads else "its exit handlers did not return"
        message = f"process {os.getpid()} was ended {SECONDS:g} s after its work was done: {kept}"
        _flush()
        with suppress(OSError, ValueError):
            print(message, file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _flush() -> None:
    """Flush the streams, as Python would at exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
