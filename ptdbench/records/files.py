"""Files and directories that are there whole or not at all.

Whoever is killed while writing leaves the old file or the new one, never half of one. What is written is
strict JSON: JSON has no NaN and no infinity, so a number that is not finite becomes ``null`` (the status and
the error of the record say what happened), and a value of another type becomes its text.

What is deleted here this very process has made in the same call; the rule for all deletions is in
:mod:`ptdbench.removal`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, value: object, durable: bool = True) -> None:
    """Write strict JSON (see the module) so that ``path`` holds all of it or what it held before.

    Args:
        path: The file.
        value: What it will hold.
        durable: Whether it must survive a crash of the machine, which takes the time of a disk.

    Raises:
        OSError: It could not be written.
    """
    # Ranks of several hosts may write at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump(strict(value), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def strict(value: Any) -> Any:
    """The same value in types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors
        return strict(value.tolist())
    return str(value)


def appear(path: Path, fill: Callable[[Path, Path], None]) -> bool:
    """Make a directory together with its first files; of several callers one does.

    Args:
        path: The directory; missing parents are made too.
        fill: Called with a folder to write at least one file into, and ``path``, which is what it will be called.

    Returns:
        Whether this call made it; ``False`` where something of that name is there.

    Raises:
        OSError: It cannot be made; nothing is left of it.
    """
    if os.path.lexists(path):
        return False
    made = [folder for folder in path.parents if not folder.exists()]
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.mkdir(parents=True)
        fill(folder, path)
        return _renamed(folder, path)
    finally:
        if folder.exists():
            for file in folder.iterdir():
                file.unlink()
        with suppress(OSError):  # not empty: it has become what was asked for, or others have put something there
            for empty in [folder, *made]:
                empty.rmdir()


def _renamed(folder: Path, path: Path) -> bool:
    """Whether a folder could get its name: it is refused where somebody else's is, as none is ever empty."""
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True
