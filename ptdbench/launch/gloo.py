"""Gloo's process groups, each with one thread that carries out its collectives; torch gives a group two.

Each of two threads writes the name of the collective it has completed into the group's status, a string, without a lock
(``ProcessGroupGloo::runLoop``; torch 2.14 dies of it). A name longer than 15 characters is on the heap, as
``ALLGATHER_COALESCED`` of a functional all-gather is: where another collective of the group ends at that moment, both
threads free one block, and the rank dies of SIGABRT or SIGSEGV, there or later. Ring attention has a gather of keys and
an all-to-all of their gradients in flight. One thread takes them in the order of the calls, as NCCL's stream does.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


@cache
def give_one_thread() -> None:
    """Let every group that gloo makes in this process from now on have one thread."""
    group: Any = dist.ProcessGroupGloo
    as_torch_does = group.__init__

    def made(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        """Make a group over the interfaces that are named for gloo, or that of the host's name, as torch does."""
        options = group._Options()
        options._threads, options._timeout = 1, timeout
        named = os.environ.get("GLOO_SOCKET_IFNAME")
        devices = [group.create_device(interface=name) for name in named.split(",")] if named else []
        options._devices = devices or [group.create_default_device()]
        for name, value in others.items():
            setattr(options, name, value)
        as_torch_does(self, store, rank, size, options)

    group.__init__ = made
