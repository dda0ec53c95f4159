"""The manifest of a checkpoint: ``manifest.json``, written last, with the checksum of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from ptdbench.records.files import write_json

MANIFEST = "manifest.json"

#: Bytes read at a time; hashing that many releases the GIL.
_BLOCK = 4 << 20


class Broken(Exception):
    """A broken checkpoint; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Stamp:
    """The expected size and checksum of a file.

    Attributes:
        bytes: Its size.
        sha256: Its checksum, in hexadecimal digits.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: Number of optimizer steps done.
        world_size: Ranks that wrote it.
        model: The options of the model, for comparison.
        facts: Other state for resuming; JSON, where a number that is not finite is ``null``.
        files: Every other file of the checkpoint, by name.
        torch: Version of torch that wrote it.
        time: When it was written, in seconds since the epoch.
    """

    step: int
    world_size: int
    model: Mapping[str, Any]
    facts: Mapping[str, Any]
    files: Mapping[str, Stamp]
    torch: str
    time: float


def stamp(path: Path) -> Stamp:
    """Size and checksum of a file.

    Raises:
        OSError: It cannot be read.
    """
    digest, block = hashlib.sha256(), bytearray(_BLOCK)
    view, size = memoryview(block), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(view[:count])
            size += count
    return Stamp(size, digest.hexdigest())


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest with a checksum of its own, and sync it to disk.

    Raises:
        OSError: It could not be written.
        TypeError: The model's options or the facts are not JSON.
    """
    body = json.loads(json.dumps(asdict(manifest)), parse_constant=lambda _: None)
    write_json(directory / MANIFEST, body | {"sha256": _digest(body)})


def read(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``.

    Raises:
        Broken: It is missing or damaged.
    """
    try:
        body = json.loads((directory / MANIFEST).read_text())
        given = body.pop("sha256")
        if given != _digest(body):
            raise Broken(f"{MANIFEST} does not match its checksum")
        files = {name: Stamp(**described) for name, described in body.pop("files").items()}
        found = Manifest(files=files, **body)
        if not _is_sound(found):
            raise Broken(f"{MANIFEST} is not a manifest")
        return found
    except FileNotFoundError:
        raise Broken(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Broken(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Broken(f"{MANIFEST} is not a manifest") from None


def _is_sound(found: Manifest) -> bool:
    """Whether every value is of its type: a checksum says that nothing was changed since, and not what was written."""
    numbers = (found.step, found.world_size, *(file.bytes for file in found.files.values()))
    lists = [found.facts.get(name, []) for name in ("segments", "evaluations")] if isinstance(found.facts, dict) else []
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and isinstance(found.model, dict)
        and isinstance(found.facts, dict)
        and isinstance(found.facts.get("scaler", {}), dict)
        and all(isinstance(items, list) and all(isinstance(item, dict) for item in items) for items in lists)
    )


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Check that every file exists and has its size.

    Raises:
        Broken: One is not.
    """
    for name, wanted in manifest.files.items():
        if PurePath(name).name != name:
            raise Broken(f"{name} is not a file name")
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise Broken(f"{name} cannot be read ({error.strerror})") from None
        if size != wanted.bytes:
            raise Broken(f"{name} has {size} bytes instead of {wanted.bytes}")


def check_contents(directory: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Read one of ``shares`` parts of the files and compare their checksums.

    Raises:
        Broken: One differs.
    """
    for name in sorted(manifest.files)[share::shares]:
        try:
            found = stamp(directory / name)
        except OSError as error:
            raise Broken(f"{name} cannot be read ({error.strerror})") from None
        if found != manifest.files[name]:
            raise Broken(f"{name} does not match its checksum")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
