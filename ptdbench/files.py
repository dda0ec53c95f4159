"""Files: written atomically, read without blocking, deleted only if the program created them; and the user's cache.

A process killed while writing leaves the old file or the new one, never a partial one. The content is strict JSON: a
number that is not finite becomes ``null`` (the status and error of the record say what happened; an option keeps
``inf`` as text, see :func:`strict`), and a value of another type becomes its text.

The program deletes only files that it created, one by one, by name, and never a directory that holds anything else.
Users put notes beside results, replace checkpoints by links to other disks, and point options at their own folders;
none of that is deleted, overwritten or renamed. All code that deletes a directory calls this module, and nothing
deletes a tree.
"""

import errno
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct, to_builtins


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError for a folder, and for a pipe or device, which might block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise opening a pipe would wait for its writer
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raises like :func:`opened`."""
    with opened(path) as file:
        return file.read()


def write_json(path: Path, value: object, durable: bool = True) -> None:
    """Write strict JSON (see the module) atomically; if ``durable``, the file survives a crash of the machine.

    An OSError has ``path`` as its ``filename``.
    """
    replace_bytes(path, f"{as_text(value)}\n".encode(), durable)


def as_text(value: object) -> str:
    """Return strict JSON (see the module), one item per line."""
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
        error.filename = str(path)  # the target, not the temporary file
        raise
    finally:
        with suppress(OSError):  # a read-only file system raises even for a missing file
            temporary.unlink(missing_ok=True)


#: Errors of a disk, or of the share of one, that takes no more.
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Free bytes of a file system below which it is called full: libraries write in larger pieces.
_FULL = 1 << 20


def lack_of_space(error: BaseException, *folders: Path) -> OSError | None:
    """Return the full disk behind an error that was raised while writing to folders, if it is one.

    Libraries report it by errors of their own: torch by a position in its file, Kineto by leaving out the file.
    """
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, OSError) and cause.errno in _OF_DISK:
            return cause
        cause = cause.__cause__ or cause.__context__
    full = (folder for folder in folders if folder.exists() and shutil.disk_usage(folder).free < _FULL)
    return next((OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) for folder in full), None)


def strict(value: Any, not_finite: Callable[[float], object] = lambda _: None) -> Any:
    """Return the same value in JSON types.

    ``not_finite`` converts numbers that JSON cannot represent, by default to ``null``; ``str`` keeps options as text.
    """
    if isinstance(value, Struct):
        return strict(to_builtins(value, enc_hook=_plain), not_finite)
    if isinstance(value, Mapping):
        return {str(key): strict(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item, not_finite) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else not_finite(float(value))
    if value is None or isinstance(value, str | int):
        return value
    plain = _plain(value)
    return plain if isinstance(plain, str) else strict(plain, not_finite)


def _plain(value: Any) -> Any:
    """Return NumPy scalars, arrays and tensors as numbers and lists, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def create_atomically(path: Path, fill: Callable[[Path, Path], None]) -> bool:
    """Create a directory together with its first files, atomically; of several concurrent callers, one succeeds.

    Missing parents are created too. ``fill`` is called with a folder to write at least one file into, and ``path``.

    Returns:
        Whether this call created the directory; ``False`` if something of that name exists.

    Raises:
        OSError: The directory cannot be created; nothing is left behind.
    """
    if os.path.lexists(path):
        return False
    made = [folder for folder in path.parents if not folder.exists()]
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.mkdir(parents=True)
        fill(folder, path)
        folder.rename(path)
        return True
    except OSError as error:
        # Something of that name exists: these folders are never empty, so none is replaced.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and os.path.lexists(path):
            return False
        raise
    finally:
        if folder.exists():
            for file in folder.iterdir():
                file.unlink()
        with suppress(OSError):  # it was renamed, or is not empty because others put something there
            for empty in [folder, *made]:
                empty.rmdir()


def first_foreign_entry(directory: Path, is_ours: Callable[[str], bool]) -> Path | None:
    """Return the first entry of a directory, by name, that is not a regular file whose name ``is_ours`` accepts.

    If ``directory`` is a file or a link, return the path itself. Raises OSError.
    """
    if directory.is_symlink() or not directory.is_dir():
        return directory
    with os.scandir(directory) as entries:
        others = [entry.path for entry in entries if not (is_ours(entry.name) and entry.is_file(follow_symlinks=False))]
    return Path(min(others)) if others else None


def foreign_path_error(path: Path) -> FileExistsError:
    """Return the error for a path occupied by something that the program did not create."""
    return FileExistsError(f"{path} was not created by ptdbench: move it elsewhere")


def remove(directory: Path, is_ours: Callable[[str], bool]) -> None:
    """Delete a directory that contains only the program's files; any other directory is left unchanged.

    Raises:
        FileExistsError: It contains something else, or is not a directory.
        OSError: It cannot be deleted, or something was added to it meanwhile, which is kept.
    """
    if other := first_foreign_entry(directory, is_ours):
        raise foreign_path_error(other)
    for name in filter(is_ours, os.listdir(directory)):
        (directory / name).unlink()
    directory.rmdir()


def user_cache() -> Path:
    """Return the folder ``ptdbench`` in the user's cache folder: ``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux.

    Without a home folder, as in a container whose user has no entry in /etc/passwd, it is in the temporary folder.
    """
    from platformdirs import user_cache_path  # most commands need no cache

    with suppress(RuntimeError):
        if (folder := user_cache_path("ptdbench")).is_absolute():
            return folder
    folder = Path(tempfile.gettempdir()) / f"ptdbench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # libraries are loaded from it
        raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
    return folder


def to_cache(kind: str, key: Mapping[str, Any], measurement: Mapping[str, Any]) -> Path:
    """Cache the latest measurement of a kind under a key in JSON types. Raises OSError."""
    path = _cached(kind, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, json.dumps({**key, **measurement}, indent=1).encode(), durable=False)
    return path


def from_cache(kind: str, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurement cached under exactly this key; empty if there is none, or the file is damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(_cached(kind, key).read_text())
        return content if isinstance(content, dict) else {}
    return {}


def latest_in_cache(kind: str) -> list[Path]:
    """Return the files of a kind, the latest first, unread; none if they cannot be listed."""
    with suppress(OSError):
        return sorted((user_cache() / kind).glob("*.json"), key=lambda path: -path.stat().st_mtime)
    return []


def _cached(kind: str, key: Mapping[str, Any]) -> Path:
    identity = json.dumps(key, sort_keys=True)
    return user_cache() / kind / f"{sha256(identity.encode()).hexdigest()[:16]}.json"
