"""The token store: a file of tokens that processes map into memory instead of reading it.

Its tokens are little-endian unsigned integers, and nothing else. A second file, ``.json``, describes them: their number
and dtype, the bytes of text that they represent, and their digest. It is written last, after the tokens have reached
the disk, so that half-written files are never trained on.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from msgspec import DecodeError, Struct, ValidationError, json

from ptdbench.files import write_json

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class TokenChunk(NamedTuple):
    """Some of the tokens to store."""

    tokens: Tokens  # shape (count,)
    bytes: int  # of text that they represent


class Stored(NamedTuple):
    """A token file."""

    tokens: Tokens  # all of them, shape (count,), mapped read-only
    bytes: int  # of text that they represent
    digest: str  # SHA-256 of the tokens as stored in the file, in hexadecimal digits


class _Description(Struct):
    """The content of the second file."""

    dtype: str
    count: int
    bytes: int
    digest: str


def cached_tokens(path: Path, dtype: npt.DTypeLike, pieces: Callable[[], Iterable[TokenChunk]]) -> Stored:
    """Map the tokens at ``path``; if there are none, one process writes them and others wait.

    The name of the file must say what the tokens were made from. The folder is created if necessary, with a lock file
    next to the file. ``pieces`` is called only by the process that writes.

    Raises:
        OSError: The folder cannot be written or locked, or the disk is full.
    """
    if stored := read_tokens(path, dtype):
        return stored
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False):
        # Another process may have written the file meanwhile.
        if not read_tokens(path, dtype):
            _write_tokens(path, dtype, pieces())
    stored = read_tokens(path, dtype)
    assert stored, f"{path} vanished or changed right after it was written"
    return stored


def read_tokens(path: Path, dtype: npt.DTypeLike) -> Stored | None:
    """Map the tokens at ``path``; ``None`` unless they are complete, and of this type."""
    dtype = _on_disk(dtype)
    try:
        description = json.decode(_second(path).read_bytes(), type=_Description)
        size = path.stat().st_size
    except (FileNotFoundError, DecodeError, ValidationError):
        return None
    if (description.dtype, description.count * dtype.itemsize) != (dtype.str, size):
        return None
    tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
    return Stored(tokens, description.bytes, description.digest)


def _write_tokens(path: Path, dtype: npt.DTypeLike, pieces: Iterable[TokenChunk]) -> None:
    """Write tokens and their description.

    The caller holds the lock, which may not exclude other hosts of a network file system: the name of the unfinished
    file contains the host's. The next writer on a host overwrites the remains of a killed one.
    """
    dtype = _on_disk(dtype)
    unfinished = path.with_name(f"{path.name}.{platform.node()}.partial")
    description, digest = _Description(dtype.str, 0, 0, ""), hashlib.sha256()
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                content = piece.tokens.astype(dtype, casting="safe", copy=False).tobytes()
                file.write(content)
                digest.update(content)
                description.count += piece.tokens.size
                description.bytes += piece.bytes
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    description.digest = digest.hexdigest()
    write_json(_second(path), description)


def _second(path: Path) -> Path:
    return path.with_suffix(".json")


def _on_disk(dtype: npt.DTypeLike) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
