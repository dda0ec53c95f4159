"""The token store: one file of tokens that processes map into memory instead of reading it.

A file is a header of :data:`HEADER_BYTES` followed by the tokens as little-endian unsigned integers. The
header is text that ``head -n 2`` shows: the name of the format, then dtype, number of tokens and ``source``,
the identity of what the tokens were made from.

A file is trusted only if its header is, byte for byte, the one that its size, dtype and source call for.
Together with a write that becomes visible by an atomic rename, after the data has reached the disk, this
keeps a half-written, truncated or outdated file from being trained on.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 4096  # a page, so that the tokens begin on one

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def cached_tokens(path: Path, dtype: npt.DTypeLike, source: str, pieces: Callable[[], Iterable[Tokens]]) -> Tokens:
    """Map the tokens at ``path``; where there are none to trust, one process writes them and others wait.

    Args:
        path: The token file. Its folder is made if need be; a lock file of the same name lies beside it.
        dtype: Unsigned integer type of the tokens in the file.
        source: Identity of what the tokens are made from, a short text such as a digest. A file made from
            anything else is written anew.
        pieces: Called only by the process that writes; its pieces are the tokens in order, at least one.

    Returns:
        All tokens, shape ``(count,)``, mapped read-only.

    Raises:
        OSError: If the folder cannot be written or locked, or the disk is full.
    """
    if (tokens := read_tokens(path, dtype, source)) is not None:
        return tokens
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_name(f"{path.name}.lock")):
        # Whoever waited for the lock finds the work done.
        if read_tokens(path, dtype, source) is None:
            write_tokens(path, dtype, source, pieces())
    tokens = read_tokens(path, dtype, source)
    assert tokens is not None, f"{path} vanished or changed right after it was written"
    return tokens


def read_tokens(path: Path, dtype: npt.DTypeLike, source: str) -> Tokens | None:
    """Map the tokens at ``path``, shape ``(count,)``; ``None`` if there is no file that can be trusted."""
    dtype = _on_disk(dtype)
    try:
        with path.open("rb") as file:
            count = (os.fstat(file.fileno()).st_size - HEADER_BYTES) // dtype.itemsize
            if file.read(HEADER_BYTES) != _header(dtype, count, source):
                return None
            return np.memmap(file, dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    except FileNotFoundError:
        return None


def write_tokens(path: Path, dtype: npt.DTypeLike, source: str, pieces: Iterable[Tokens]) -> None:
    """Write a token file that appears at ``path`` complete or not at all.

    The caller holds the lock. It may not reach other hosts of a network file system, so the unfinished file
    carries the host's name; what a killed writer left is overwritten by the next one on that host.
    """
    dtype = _on_disk(dtype)
    partial = path.with_name(f"{path.name}.{platform.node()}.partial")
    try:
        with partial.open("wb") as file:
            file.seek(HEADER_BYTES)  # the header names the count, which is known at the end
            for piece in pieces:
                file.write(piece.astype(dtype, casting="safe", copy=False).tobytes())
            count = (file.tell() - HEADER_BYTES) // dtype.itemsize
            file.seek(0)
            file.write(_header(dtype, count, source))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _on_disk(dtype: npt.DTypeLike) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _header(dtype: np.dtype[Any], count: int, source: str) -> bytes:
    fields = json.dumps({"dtype": dtype.str, "count": count, "source": source})
    return f"ptdbench tokens 1\n{fields}\n".encode().ljust(HEADER_BYTES)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel gives back even if this process is killed."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
