"""The default cache folder for data sets, tokens and measurements, and the cache of measurements for later runs."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from errno import EPERM
from hashlib import sha256
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from ptdbench.files import replace_bytes


def user_cache() -> Path:
    """Return the folder ``ptdbench`` in the user's cache folder: ``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux.

    Without a home folder, as in a container whose user has no entry in /etc/passwd, it is in the temporary folder.
    """
    with suppress(RuntimeError):
        if (folder := user_cache_path("ptdbench")).is_absolute():
            return folder
    folder = Path(tempfile.gettempdir()) / f"ptdbench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # libraries are loaded from it
        raise PermissionError(EPERM, "belongs to another user", str(folder))
    return folder


def keep(kind: str, key: Mapping[str, Any], measurement: Mapping[str, Any]) -> Path:
    """Cache the latest measurement of a kind under a key in JSON types. Raises OSError."""
    path = _path(kind, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, json.dumps({**key, **measurement}, indent=1).encode(), durable=False)
    return path


def look_up(kind: str, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurement cached under exactly this key; empty if there is none, or the file is damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(_path(kind, key).read_text())
        return content if isinstance(content, dict) else {}
    return {}


def latest(kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of a kind, the latest first, with their measurements and keys; damaged ones are omitted."""
    with suppress(OSError):
        for path in sorted((user_cache() / kind).glob("*.json"), key=lambda path: -path.stat().st_mtime):
            with suppress(OSError, ValueError):
                yield path, json.loads(path.read_text())


def _path(kind: str, key: Mapping[str, Any]) -> Path:
    identity = json.dumps(key, sort_keys=True)
    return user_cache() / kind / f"{sha256(identity.encode()).hexdigest()[:16]}.json"
