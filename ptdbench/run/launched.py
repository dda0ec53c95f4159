"""Ranks that a launcher started: how they are recognized, and led by rank 0, which alone reads the command line.

Nothing here imports torch before ranks meet.
"""

import os
import socket
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path

from ptdbench.launch.world import BY_HAND, LAUNCHERS, World, discover
from ptdbench.problems import ConfigError

#: Sent by rank 0 after the last run, in place of a directory.
_END = ""

#: The number of the command in this process, and of the last message within it.
_place = [0, 0]


def recognize(environ: MutableMapping[str, str], words: Iterable[str]) -> None:
    """Mark this process as a rank if one of the words is ``cluster=env``; torchrun's own ranks stay torchrun's.

    Its launcher sets the variables that torch's ``env://`` reads, and none of its own. Such variables are often stale,
    so they count only if ``cluster=env`` is typed as a word of the command line: ranks other than 0 compose no
    configuration.

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


def begin() -> None:
    """Begin another command in this process, as ranks may have left the one before at different places."""
    _place[:] = [_place[0] + 1, 0]


def lead(directory: Path) -> None:
    """As rank 0 of a launch, have the other ranks execute the run of a directory; nothing if there are none."""
    if (world := discover(os.environ)) and world.size > 1:
        _say(world, str(directory.absolute()), None)


def dismiss(refused: ConfigError | None = None) -> None:
    """As rank 0 of a launch, tell the other ranks that there is no further run, or that the command is refused."""
    with suppress(Exception):  # of the environment itself, this very refusal, or the others have ended
        if (world := discover(os.environ)) and world.is_first and world.size > 1:
            _say(world, _END, refused)


def follow(world: World) -> Path | None:
    """As another rank of a launch, execute the runs that rank 0 names; return the last one's directory, if any.

    Raises:
        ConfigError: Rank 0 has refused the command, and said why.
        SystemExit: A run failed here; the reason is in the run's directory.
    """
    last = None
    while (directory := _say(world, _END, None)) != _END:
        from ptdbench.run.door import run

        run(last := Path(directory))
    return last


def _say(world: World, directory: str, refused: ConfigError | None) -> str:
    """Return the message of rank 0; arguments on other ranks are ignored."""
    from ptdbench.launch import rendezvous  # it imports torch

    _place[1] += 1
    message = rendezvous.agree("command {}.{}".format(*_place), world, lambda: f"run {directory}", refused)
    return message.removeprefix("run ")
