"""A lock between processes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which the kernel releases even if this process is killed.

    Raises:
        OSError: The file cannot be created, or its file system does not support locks.
    """
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
