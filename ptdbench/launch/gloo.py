"""Gloo process groups with a single worker thread each, where torch uses two.

With two threads, each writes the name of the collective it has completed into the group's status, a string, without a
lock (``ProcessGroupGloo::runLoop``, as of torch 2.14). A name longer than 15 characters is on the heap, such as
``ALLGATHER_COALESCED`` of a functional all-gather: if another collective of the group ends at the same moment, both
threads free the same block, and the rank dies of SIGABRT or SIGSEGV, then or later. Ring attention has an all-gather of
keys and an all-to-all of their gradients in flight. A single thread runs them in call order, as NCCL's stream does.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


@cache
def give_one_thread() -> None:
    """From now on, give every gloo group made in this process a single thread."""
    group: Any = dist.ProcessGroupGloo
    as_torch_does = group.__init__

    def made(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        """Make a group over the interfaces in GLOO_SOCKET_IFNAME, or that of the host name, as torch does."""
        options = group._Options()
        options._threads, options._timeout = 1, timeout
        named = os.environ.get("GLOO_SOCKET_IFNAME")
        devices = [group.create_device(interface=name) for name in named.split(",")] if named else []
        options._devices = devices or [group.create_default_device()]
        for name, value in others.items():
            setattr(options, name, value)
        as_torch_does(self, store, rank, size, options)

    group.__init__ = made
