"""The manifest of a checkpoint: ``manifest.json``, written last, with the checksum of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import asdict

from ptdbench.files import write_json
from ptdbench.records.schema import Count, Evaluation

MANIFEST = "manifest.json"

#: Bytes read at a time; hashing that many releases the GIL.
_BLOCK = 4 << 20


class Broken(Exception):
    """A broken checkpoint; the message names the file and what is wrong with it."""


class Stamp(Struct, frozen=True):
    """The expected size of a file, and its checksum in hexadecimal digits."""

    bytes: Count
    sha256: str


class Manifest(Struct, frozen=True):
    """The description of a checkpoint."""

    step: Count  #: Number of optimizer steps done.
    world_size: Count  #: Ranks that wrote it.
    model: Mapping[str, Any]  #: The options of the model, for comparison.
    facts: Mapping[str, Any]  #: Other state for resuming; JSON, where a number that is not finite is ``null``.
    files: Mapping[str, Stamp]  #: Every other file of the checkpoint, by name.
    torch: str  #: Version of torch that wrote it.
    time: float  #: When it was written, in seconds since the epoch.


class _Facts(Struct):
    """The facts that are read without a look at their types: a checksum says that nothing was changed since."""

    scaler: dict[str, Any] = {}
    segments: list[dict[str, Any]] = []
    evaluations: list[Evaluation] = []


def stamp(path: Path) -> Stamp:
    """Return size and checksum of a file; raises OSError."""
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
    written = asdict(manifest) | {"files": to_builtins(manifest.files)}
    body = json.loads(json.dumps(written), parse_constant=lambda _: None)
    write_json(directory / MANIFEST, body | {"sha256": _digest(body)})


def read(directory: Path) -> Manifest:
    """Return the manifest of the checkpoint in ``directory``; raises Broken if it is missing or damaged."""
    try:
        body = json.loads((directory / MANIFEST).read_text())
        given = body.pop("sha256")
        if given != _digest(body):
            raise Broken(f"{MANIFEST} does not match its checksum")
        convert(body.get("facts"), _Facts)
        return convert(body, Manifest)
    except FileNotFoundError:
        raise Broken(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Broken(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Broken(f"{MANIFEST} is not a manifest") from None


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise Broken unless every file exists and has its size."""
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
    """Raise Broken unless the checksums match, of one of ``shares`` parts of the files."""
    for name in sorted(manifest.files)[share::shares]:
        try:
            found = stamp(directory / name)
        except OSError as error:
            raise Broken(f"{name} cannot be read ({error.strerror})") from None
        if found != manifest.files[name]:
            raise Broken(f"{name} does not match its checksum")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
