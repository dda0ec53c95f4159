"""``cluster=env``: ranks whose launcher sets the variables that torch's ``env://`` reads, and none of its own.

Such variables are often stale, so they count only if ``cluster=env`` is typed as a word of the command line: ranks
other than 0 compose no configuration.
"""

import socket
from collections.abc import Iterable, MutableMapping

from ptdbench.launch.world import BY_HAND, LAUNCHERS, discover


def recognize(environ: MutableMapping[str, str], words: Iterable[str]) -> None:
    """Mark this process as a rank if one of the words is ``cluster=env``; torchrun's own ranks stay torchrun's.

    Raises:
        ConfigError: A variable is missing or wrong, or the ranks do not find each other.
    """
    if "cluster=env" in words:
        environ[BY_HAND] = "1"
    row = LAUNCHERS["env"]
    if not row.started(environ) or environ.get(row.local_size) or LAUNCHERS["torchrun"].started(environ):
        return
    environ[row.local_size] = environ.get(row.size, "")  # until they have met
    world = discover(environ)
    if world and world.size > 1:
        from ptdbench.launch import rendezvous  # it imports torch

        store, host = rendezvous.store(), socket.gethostname()
        store.set(f"host {world.rank}", host)
        hosts = store.multi_get([f"host {rank}" for rank in range(world.size)])
        environ[row.local_size] = str(hosts.count(host.encode()))
