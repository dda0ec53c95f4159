"""One process at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which the kernel gives back even if this process is killed.

    Raises:
        OSError: If the file cannot be made, or its file system knows no locks.
    """
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
