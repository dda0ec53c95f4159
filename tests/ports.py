"""Ports for what tests start, where a port has to be known before anybody listens at it."""

import os
import socket
from contextlib import suppress
from itertools import count

#: Above what the system uses, and below the ports of test clusters (7000), of jobs (10000), and those that the kernel
#: gives to any connection: one of these may be taken by a stranger between its choice and its use.
_FIRST, _LAST = 3000, 6999

#: Test processes that run side by side begin at different ports.
_NEXT = count(os.getpid() * 97)


def free_port() -> int:
    """A port of this machine at which nobody listens; each call returns another one."""
    while True:
        port = _FIRST + next(_NEXT) % (_LAST - _FIRST + 1)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
