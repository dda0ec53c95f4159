"""The token store: one file of tokens that processes map into memory instead of reading it.

A file is a header of :data:`HEADER_BYTES` followed by the tokens as little-endian unsigned integers. The header is
text that ``head -n 2`` shows: the name of the format, then dtype, number of tokens, ``source`` (the identity of the
tokens' input), the bytes of text that the tokens represent, and a digest of the tokens.

A file is trusted only if its header follows, byte for byte, from its size, dtype, source and the last two figures. The
digest identifies the tokens; it is not recomputed. A write becomes visible only by an atomic rename, after the data
have reached the disk, so that half-written, truncated or outdated files are never trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from ptdbench.files import foreign_path_error

HEADER_BYTES = 4096  # a page, so that the tokens begin on one

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_FORMAT = b"ptdbench tokens "
_FIGURES = re.compile(rb'"bytes": (\d+), "digest": "([0-9a-f]{64})"\}\n')


class TokenChunk(NamedTuple):
    """Some of the tokens to store."""

    tokens: Tokens  # shape (count,)
    bytes: int  # of text that they represent


class Stored(NamedTuple):
    """A token file."""

    tokens: Tokens  # all of them, shape (count,), mapped read-only
    bytes: int  # of text that they represent
    digest: str  # SHA-256 of the tokens as stored in the file, in hexadecimal digits


def cached_tokens(path: Path, dtype: npt.DTypeLike, source: str, pieces: Callable[[], Iterable[TokenChunk]]) -> Stored:
    """Map the tokens at ``path``; if there is no trusted file, one process writes it and others wait.

    The folder is created if necessary, with a lock file next to the file. ``source`` identifies the input of the
    tokens, for example by a digest: a file from another source is replaced. ``pieces`` is called only by the process
    that writes, and yields at least one token.

    Raises:
        OSError: The folder cannot be written or locked, or the disk is full.
    """
    if stored := read_tokens(path, dtype, source):
        return stored
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False):
        # Another process may have written the file meanwhile.
        if not read_tokens(path, dtype, source):
            write_tokens(path, dtype, source, pieces())
    stored = read_tokens(path, dtype, source)
    assert stored, f"{path} vanished or changed right after it was written"
    return stored


def read_tokens(path: Path, dtype: npt.DTypeLike, source: str) -> Stored | None:
    """Map the tokens at ``path``; ``None`` if there is no trusted file."""
    dtype = _on_disk(dtype)
    try:
        with path.open("rb") as file:
            count = (os.fstat(file.fileno()).st_size - HEADER_BYTES) // dtype.itemsize
            header = file.read(HEADER_BYTES)
            if not (figures := _FIGURES.search(header)):
                return None
            text_bytes, digest = int(figures[1]), figures[2].decode()
            if header != _header(dtype, count, source, text_bytes, digest):
                return None
            return Stored(np.memmap(file, dtype, mode="r", offset=HEADER_BYTES, shape=(count,)), text_bytes, digest)
    except FileNotFoundError:
        return None


def write_tokens(path: Path, dtype: npt.DTypeLike, source: str, pieces: Iterable[TokenChunk]) -> None:
    """Write a token file that appears at ``path`` complete or not at all.

    The caller holds the lock, which may not exclude other hosts of a network file system: the name of the unfinished
    file contains the host's. The next writer on a host overwrites the remains of a killed one.

    Raises:
        FileExistsError: A file that is not a token file is in its place; it is kept.
        OSError: The file cannot be written.
    """
    dtype = _on_disk(dtype)
    partial = path.with_name(f"{path.name}.{platform.node()}.partial")
    for place in (path, partial):
        if os.path.lexists(place) and not _is_ours(place):
            raise foreign_path_error(place)
    text_bytes, digest = 0, hashlib.sha256()
    unfinished = partial.open("wb")
    try:
        with unfinished as file:
            file.seek(HEADER_BYTES)  # the header has figures that are known only at the end
            for piece in pieces:
                content = piece.tokens.astype(dtype, casting="safe", copy=False).tobytes()
                file.write(content)
                digest.update(content)
                text_bytes += piece.bytes
            count = (file.tell() - HEADER_BYTES) // dtype.itemsize
            file.seek(0)
            file.write(_header(dtype, count, source, text_bytes, digest.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """Return whether a file starts like a token file, complete or not: with a header or its reserved space."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(len(_FORMAT))
    return start == _FORMAT or not start.strip(b"\0")


def _on_disk(dtype: npt.DTypeLike) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _header(dtype: np.dtype[Any], count: int, source: str, text_bytes: int, digest: str) -> bytes:
    fields = json.dumps({"dtype": dtype.str, "count": count, "source": source, "bytes": text_bytes, "digest": digest})
    return (_FORMAT + f"2\n{fields}\n".encode()).ljust(HEADER_BYTES)
