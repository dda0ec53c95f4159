"""Imports of the fork server, so that ranks need not repeat them; imported nowhere else.

Every rank is forked from that server, so these imports cost their seconds once per sweep. Nothing here may initialize
CUDA: a forked process cannot use its parent's CUDA context.
"""

import ctypes
import os
import signal
import warnings
from contextlib import suppress
from multiprocessing import forkserver
from types import FrameType

from ptdbench.launch.lifetime import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

#: The fork server, the process that imported this. A rank whose parent is another process has lost it.
SERVER = os.getpid()

#: The process that started it.
_STARTER = os.getppid()


def _end(number: int, _: object) -> None:
    """End as by default, but remove the server's socket and its folder if its starter was killed, and cannot."""
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if os.getpid() == SERVER and os.getppid() != _STARTER and address:
        with suppress(OSError):  # processes that the starter was forked from, or has forked, share the folder
            os.unlink(address)
            os.rmdir(os.path.dirname(address))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the server without a traceback during its imports, after which it ignores Ctrl-C; raise in its children."""
    if os.getpid() == SERVER:
        os._exit(128 + number)
    signal.default_int_handler(number, frame)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
signal.signal(signal.SIGTERM, _end)
# Otherwise the server would live as long as any rank, and a rank that waits for a peer may live forever.
# torch.multiprocessing does the same for every rank with respect to the server.
die_with_parent(signal.SIGTERM)
# Become the parent of processes that ranks leave behind, so that they can be found.
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # when it ends
