"""Ends of processes: a child ends with its parent, and a process whose work is done ends within seconds."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None)  # at import, as a forked process should load nothing

#: Seconds that threads and exit handlers have when the work of a process is done.
EXIT_SECONDS = 5.0


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends, even by SIGKILL."""
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended between the two calls
        os._exit(1)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and return its exit status; signal handlers run within a second.

    A single long wait would not be interrupted if another thread received the signal.
    """
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return int(process.returncode)


def exit_soon() -> None:
    """Force this process to exit a few seconds from now, unless it does so itself; call it when no work is left.

    Python waits indefinitely for non-daemon threads and exit handlers, and a user's model may leave some. Python also
    destroys torch's remaining process groups: the destructor of an NCCL group aborts its communicators, which may wait
    for a kernel that waits for a failed peer.

    It exits at once if it fails while it has a process group: only a successful run destroys its group. The exit status
    follows from the exception in flight: call this in a ``finally``.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # the exit status that Python would use
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        status = int(error is not None)
    distributed = sys.modules.get("torch.distributed")
    if status and distributed and distributed.is_available() and distributed.is_initialized():
        if not isinstance(error, SystemExit):
            traceback.print_exc()  # as Python would
        logging.shutdown()
        _flush()
        os._exit(status)
    threading.Thread(target=_leave, args=(status,), daemon=True, name="leaving").start()


def _leave(status: int) -> None:
    time.sleep(EXIT_SECONDS)
    try:
        living = [thread.name for thread in threading.enumerate() if not thread.daemon]
        threads = ", ".join(name for name in living if name != threading.main_thread().name)
        kept = f"these threads were still running: {threads}" if threads else "its exit handlers did not return"
        message = f"process {os.getpid()} was ended {EXIT_SECONDS:g} s after its work was done: {kept}"
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
