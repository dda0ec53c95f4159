"""The rendezvous of ranks that all live on this machine.

torch's own agent waits up to 0.3 s at random before it meets the agents of other nodes, so that hundreds of them do
not knock at once: most of what a run in the middle of a sweep would pay for being started. Here is nobody to meet.
"""

from __future__ import annotations

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ptdbench.launch.address import HERE, listen


class HostRendezvous(RendezvousHandler):
    """One agent, met by itself at once; its store, on a port that the kernel chooses, serves the ranks too.

    Args:
        run_id: The launch's name, unique on this machine.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        port, descriptor = listen(HERE, 0)
        self._store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to this process's store instead of opening one on a port that may be taken."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Agent 0 of 1."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(HERE, self._store.port))

    def get_backend(self) -> str:
        """What kind of rendezvous this is, for messages."""
        return "ptdbench-host"

    def get_run_id(self) -> str:
        """The launch's name."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Nobody joins later."""
        return 0

    def is_closed(self) -> bool:
        """Never before the agent itself ends."""
        return False

    def set_closed(self) -> None:
        """Nobody else would have to know."""

    def shutdown(self) -> bool:
        """The store goes with this object."""
        return True
