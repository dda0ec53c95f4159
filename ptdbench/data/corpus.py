"""Text as it lies on disk: which files are its documents, what identifies them, and their bytes."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SEPARATOR = b"\0"  # ends every document; text does not contain it

_BLOCK_BYTES = 1 << 24  # a document may be larger than memory
# Installed packages differ from machine to machine, and tests are less like the code that people write.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class Document(NamedTuple):
    """A file of the corpus as it was when the corpus was listed."""

    path: Path
    size: int  # bytes
    modified: int  # nanoseconds since the epoch


def standard_library() -> list[Document]:
    """The Python sources of the standard library that runs this program; none if only bytecode is there."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    paths = _walk(root, without=_NOT_THE_LIBRARY)
    return _documents(path for path in paths if path.suffix == ".py")


def documents_at(root: Path) -> list[Document]:
    """The file ``root``, or the files in and below the folder ``root`` that are neither hidden nor empty.

    Raises:
        OSError: If ``root`` or a folder below it cannot be listed.
    """
    return _documents(_walk(root) if root.is_dir() else [root])


def identity(documents: Iterable[Document]) -> str:
    """A digest that changes with the name, size or modification time of any document, or their order."""
    listing = [(str(document.path), document.size, document.modified) for document in documents]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def token_count(documents: Iterable[Document]) -> int:
    """Number of tokens that :func:`byte_tokens` gives."""
    return sum(document.size + len(SEPARATOR) for document in documents)


def byte_tokens(documents: Iterable[Document]) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of all documents in order, each document ended by :data:`SEPARATOR`, in uint8 pieces.

    Raises:
        OSError: If a document cannot be read.
    """
    for document in documents:
        with document.path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield np.frombuffer(block, np.uint8)
        yield np.frombuffer(SEPARATOR, np.uint8)


def _documents(paths: Iterable[Path]) -> list[Document]:
    """The non-empty files among ``paths``, in an order that does not depend on the file system."""
    found = []
    for path in paths:
        if path.is_file():  # no broken link, and no pipe, which would be read for ever
            status = path.stat()
            found.append(Document(path, status.st_size, status.st_mtime_ns))
    return sorted(document for document in found if document.size > 0)


def _walk(root: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file in and below ``root``, except what is hidden and what lies in folders named ``without``."""
    for folder, folders, names in os.walk(root, onerror=_reraise):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _reraise(error: OSError) -> None:
    """``os.walk`` skips folders that it cannot list; half a corpus must not pass for the whole."""
    raise error
