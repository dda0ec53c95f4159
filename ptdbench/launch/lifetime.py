"""Lifetimes of child processes: they end with their parent, and the parent waits for them."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # at import, as a forked process should load nothing


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends, even by SIGKILL; only on Linux."""
    if _LIBC:
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
