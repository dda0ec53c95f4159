"""Files: written atomically, read whatever they are, and removed only where nothing foreign is in the way.

A process killed while writing leaves the old file or the new one, never a partial one. The content is strict JSON: a
number that is not finite becomes ``null`` (the status and error of the record say what happened; what was asked for is
written as it is typed, see :func:`strict`), and a value of another type becomes its text.

The program deletes only files that it created, one by one, by name, and never a directory that holds anything else.
Users put notes beside results, replace checkpoints by links to other disks, and point options at their own folders;
none of that is deleted, overwritten or renamed. All code that deletes a directory calls this module, and nothing
deletes a tree.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


def opened(path: Path) -> BinaryIO:
    """Open a file for reading; raises OSError also for a folder, a pipe or a device, on which a reader might wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer here
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raises as :func:`opened`."""
    with opened(path) as file:
        return file.read()


def write_json(path: Path, value: object, durable: bool = True) -> None:
    """Write strict JSON (see the module) atomically; if ``durable``, it survives a crash of the machine.

    Raises:
        OSError: It could not be written; its ``filename`` is ``path``.
    """
    replace_bytes(path, f"{as_text(value)}\n".encode(), durable)


def as_text(value: object) -> str:
    """Write strict JSON (see the module), an item a line."""
    return json.dumps(strict(value), indent=1, allow_nan=False)


def replace_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically; see :func:`write_json`, also for errors."""
    # Ranks of several hosts may write at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # what was to be written, and not the name that it had meanwhile
        raise
    finally:
        with suppress(OSError):  # on a file system that is read-only, even of a file that is not there
            temporary.unlink(missing_ok=True)


def strict(value: Any, not_finite: Callable[[float], object] = lambda _: None) -> Any:
    """Return the same value in JSON types.

    ``not_finite`` says what a number becomes that JSON has not; ``str`` for options, of which ``inf`` is not ``null``.
    """
    if isinstance(value, Mapping):
        return {str(key): strict(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item, not_finite) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else not_finite(float(value))
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors
        return strict(value.tolist(), not_finite)
    return str(value)


def appear(path: Path, fill: Callable[[Path, Path], None]) -> bool:
    """Create a directory together with its first files, atomically; of several callers one succeeds.

    Missing parents are made too. ``fill`` is called with a folder to write at least one file into, and ``path``.

    Returns:
        Whether this call created it; ``False`` if something of that name exists.

    Raises:
        OSError: It cannot be created; nothing is left behind.
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
        with suppress(OSError):  # not empty: it was renamed, or others put something there
            for empty in [folder, *made]:
                empty.rmdir()


def _renamed(folder: Path, path: Path) -> bool:
    """Return whether a folder could be renamed: this fails if another exists, as none is ever empty."""
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def first_foreign_entry(directory: Path, is_ours: Callable[[str], bool]) -> Path | None:
    """Return the first entry of a directory, by name, that the program did not create: no regular file of such a name.

    The path itself if it is not a directory but a file or a link.

    Raises:
        OSError: The directory cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return directory
    with os.scandir(directory) as entries:
        others = [entry.path for entry in entries if not (is_ours(entry.name) and entry.is_file(follow_symlinks=False))]
    return Path(min(others)) if others else None


def in_the_way(path: Path) -> FileExistsError:
    """Return the error for a path that is occupied by something the program did not create."""
    return FileExistsError(f"{path} was not created by ptdbench: move it elsewhere")


def remove(directory: Path, is_ours: Callable[[str], bool]) -> None:
    """Delete a directory that holds only the program's own files; any other directory is left unchanged.

    Raises:
        FileExistsError: It holds something else, or is not a directory.
        OSError: It cannot be deleted, or something was put into it meanwhile, which is kept.
    """
    if other := first_foreign_entry(directory, is_ours):
        raise in_the_way(other)
    for name in filter(is_ours, os.listdir(directory)):
        (directory / name).unlink()
    directory.rmdir()
