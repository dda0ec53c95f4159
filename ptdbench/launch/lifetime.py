"""How processes live with the one that started them: they end with it, and it waits for them."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # here, as a process that was forked should load nothing


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends, by SIGKILL too; only Linux can."""
    if _LIBC:
        parent = os.getppid()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent went between the two calls
            os._exit(1)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and return its exit status; handlers of signals run within a second.

    Where another thread has taken a signal, as it may while this one starts a process, nothing interrupts a wait.
    """
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return int(process.returncode)
