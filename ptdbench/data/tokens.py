"""The token store: one file of tokens that processes map into memory instead of reading it.

A file is a header of :data:`HEADER_BYTES` followed by the tokens as little-endian unsigned integers. The
header is text that ``head -n 2`` shows: the name of the format, then dtype, number of tokens, ``source``, the
identity of what the tokens were made from, the bytes of text that they stand for and a digest of the tokens.

A file is trusted only if its header is, byte for byte, the one that its size, dtype and source and the two figures
in it call for. The digest names the tokens; it is not computed again to check them. Together with a write that
becomes visible by an atomic rename, after the data has reached the disk, this keeps a half-written, truncated or
outdated file from being trained on.
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

from ptdbench.files import in_the_way

HEADER_BYTES = 4096  # a page, so that the tokens begin on one

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_FORMAT = b"ptdbench tokens "
_FIGURES = re.compile(rb'"bytes": (\d+), "digest": "([0-9a-f]{64})"\}\n')


class Piece(NamedTuple):
    """Some of the tokens that are to be stored."""

    tokens: Tokens  # shape (count,)
    bytes: int  # of text that they stand for


class Stored(NamedTuple):
    """A token file."""

    tokens: Tokens  # all of them, shape (count,), mapped read-only
    bytes: int  # of text that they stand for
    digest: str  # SHA-256 of the tokens as they lie in the file, in hexadecimal digits


def cached_tokens(path: Path, dtype: npt.DTypeLike, source: str, pieces: Callable[[], Iterable[Piece]]) -> Stored:
    """Map the tokens at ``path``; where there are none to trust, one process writes them and others wait.

    The folder is made if need be; a lock file of the same name lies beside the file. ``source`` identifies what the
    tokens are made from, such as a digest: a file made from anything else is written anew. ``pieces`` is called only by
    the process that writes, for the tokens in order, at least one.

    Raises:
        OSError: If the folder cannot be written or locked, or the disk is full.
    """
    if stored := read_tokens(path, dtype, source):
        return stored
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False):
        # After waiting for the lock, the work may be done.
        if not read_tokens(path, dtype, source):
            write_tokens(path, dtype, source, pieces())
    stored = read_tokens(path, dtype, source)
    assert stored, f"{path} vanished or changed right after it was written"
    return stored


def read_tokens(path: Path, dtype: npt.DTypeLike, source: str) -> Stored | None:
    """Map the tokens at ``path``; ``None`` if there is no file that can be trusted."""
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


def write_tokens(path: Path, dtype: npt.DTypeLike, source: str, pieces: Iterable[Piece]) -> None:
    """Write a token file that appears at ``path`` complete or not at all.

    The caller holds the lock. It may not reach other hosts of a network file system, so the unfinished file
    carries the host's name; what a killed writer left is overwritten by the next one on that host.

    Raises:
        FileExistsError: A file that no writer of tokens has left is in its place; it stays.
        OSError: It cannot be written.
    """
    dtype = _on_disk(dtype)
    partial = path.with_name(f"{path.name}.{platform.node()}.partial")
    for place in (path, partial):
        if os.path.lexists(place) and not _is_ours(place):
            raise in_the_way(place)
    text_bytes, digest = 0, hashlib.sha256()
    unfinished = partial.open("wb")
    try:
        with unfinished as file:
            file.seek(HEADER_BYTES)  # the header names figures that are known at the end
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
    """Return whether a file begins like a token file, complete or not: with its header or the space reserved for it."""
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
