"""Imports of the fork server, made once so that no rank has to: imported there and nowhere else.

Every rank is a fork of that server, so the seconds these imports cost are paid once a sweep. Nothing here
may initialize CUDA: a forked process cannot use a CUDA context of its parent.
"""

import ctypes
import os
import sys
import warnings

from ptdbench.launch.lifetime import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

#: The process that has imported this: the fork server. A rank whose parent is another one has lost it.
SERVER = os.getpid()


if sys.platform == "linux":
    # It would otherwise live as long as one rank does, and a rank that waits for a peer lives for ever.
    # torch.multiprocessing asks the same for every rank with respect to the server.
    die_with_parent()
    # Become the parent of what a rank has started and left behind, so that whoever starts ranks can find it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # when it ends
