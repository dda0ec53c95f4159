"""Processes that end with the one that started them, however that ends, SIGKILL included."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # here, as a process that was forked should load nothing


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends; only Linux can."""
    if _LIBC:
        parent = os.getppid()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent went between the two calls
            os._exit(1)
