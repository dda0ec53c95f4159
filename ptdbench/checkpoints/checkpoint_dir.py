"""A run's checkpoints on disk: ``checkpoints/step-00000100/``, with the suffix ``.partial`` while being written.

Its ``manifest.json``, written last, contains the checksum of every file. A directory gets its final name when all of it
is on disk, and loses it before anything in it is deleted, so that a killed process never leaves an incomplete
checkpoint under a final name. A directory with anything else, such as a user's notes, is neither deleted nor renamed;
see :mod:`ptdbench.files`.
"""

import hashlib
import json
import os
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch.distributed as dist
from msgspec import Struct, convert, to_builtins
from msgspec.structs import asdict

from ptdbench.files import first_foreign_entry, foreign_path_error, remove, write_json
from ptdbench.launch.collect import gather
from ptdbench.records.schema import Count, Evaluation

MANIFEST = "manifest.json"

#: Bytes read at a time; hashing a block of this size releases the GIL.
_BLOCK = 4 << 20


class BrokenCheckpoint(Exception):
    """A checkpoint is broken, with the file and the fault."""


class Stamp(Struct, frozen=True):
    """The expected size of a file, and its checksum in hexadecimal digits."""

    bytes: Count
    sha256: str


class Manifest(Struct, frozen=True):
    """The description of a checkpoint."""

    step: Count  #: Number of optimizer steps done.
    world_size: Count  #: Ranks that wrote it.
    model: Mapping[str, Any]  #: The options of the model, for comparison.
    facts: Mapping[str, Any]  #: Other state for resuming, in JSON types; a number that is not finite is ``null``.
    files: Mapping[str, Stamp]  #: Every other file of the checkpoint, by name.
    torch: str  #: Version of torch that wrote it.
    time: float  #: When it was written, in seconds since the epoch.


class _Facts(Struct):
    """The facts whose types are checked on reading, as they are used without checks."""

    scaler: dict[str, Any] = {}
    segments: list[dict[str, Any]] = []
    evaluations: list[Evaluation] = []


def stamp(path: Path) -> Stamp:
    """Return size and checksum of a file; may raise OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return Stamp(size, digest.hexdigest())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest with its own checksum, and sync it to disk.

    Raises:
        OSError: It could not be written.
        TypeError: The model's options or the facts are not of JSON types.
    """
    written = asdict(manifest) | {"files": to_builtins(manifest.files)}
    body = json.loads(json.dumps(written), parse_constant=lambda _: None)
    write_json(directory / MANIFEST, body | {"sha256": _digest(body)})


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of the checkpoint in ``directory``; raise BrokenCheckpoint if it is missing or damaged."""
    try:
        body = json.loads((directory / MANIFEST).read_text())
        if body.pop("sha256") != _digest(body):
            raise BrokenCheckpoint(f"{MANIFEST} does not match its checksum")
        convert(body.get("facts"), _Facts)
        return convert(body, Manifest)
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise BrokenCheckpoint(f"cannot read {MANIFEST} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BrokenCheckpoint(f"{MANIFEST} is not a manifest") from None


def verify(directory: Path, share: int = 0, shares: int = 1) -> Manifest:
    """Return the manifest of a checkpoint; raise BrokenCheckpoint if a file is missing, or not as the saver wrote it.

    Checksums, which take long, are verified for part ``share`` of ``shares`` parts of the files; for none if 0.
    """
    manifest, name = read_manifest(directory), ""
    try:
        for name, expected in manifest.files.items():
            if PurePath(name).name != name:
                raise BrokenCheckpoint(f"{name} is not a file name")
            if (size := (directory / name).stat().st_size) != expected.bytes:
                raise BrokenCheckpoint(f"{name} has {size} bytes instead of {expected.bytes}")
        for name in sorted(manifest.files)[share::shares] if shares else ():
            if stamp(directory / name) != manifest.files[name]:
                raise BrokenCheckpoint(f"{name} does not match its checksum")
    except OSError as error:
        raise BrokenCheckpoint(f"cannot read {name} ({error.strerror})") from None
    return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


FOLDER = "checkpoints"

_PARTIAL, _DELETED = ".partial", ".deleted"

_STEP = re.compile(r"step-\d{8,}")

#: All file names that the saver uses, including temporary ones.
_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json|\.manifest\.json\.[0-9a-f]{8}\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its directory, and its manifest."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class NewestCheckpoint:
    """The result of a search for the newest checkpoint."""

    checkpoint: Checkpoint | None  #: The newest complete checkpoint, if there is one.
    broken: Mapping[Path, str]  #: Newer checkpoints that are skipped, with the broken file and its fault.

    @property
    def warnings(self) -> list[str]:
        """A warning for each skipped checkpoint."""
        return [f"skipping {path}: {fault}" for path, fault in self.broken.items()]


def newest(run_directory: Path, group: dist.ProcessGroup | None = None) -> NewestCheckpoint:
    """Return the newest checkpoint that is complete and matches its checksums; called in all ranks, with one result.

    Every rank checks names and sizes; ranks share reading the files.
    """
    broken: dict[Path, str] = {}
    # Rank 0's list: a network file system may show an older one to other hosts.
    for name in gather([path.name for path in _published(run_directory)], group)[0]:
        path, fault = run_directory / FOLDER / name, ""
        manifest: Manifest | None = None
        try:
            manifest = verify(path, dist.get_rank(group), dist.get_world_size(group))
        except BrokenCheckpoint as error:
            fault = str(error)
        faults = dict.fromkeys(filter(None, gather(fault, group)))
        if manifest and not faults:
            return NewestCheckpoint(Checkpoint(path, manifest), broken)
        broken[path] = "; ".join(faults)
    return NewestCheckpoint(None, broken)


def latest_manifest(run_directory: Path) -> Manifest | None:
    """Return the manifest of the newest checkpoint that seems complete, without reading its files."""
    return next(filter(None, map(_manifest_if_complete, _published(run_directory))), None)


def partial(run_directory: Path, step: int) -> Path:
    """Return the directory in which the checkpoint after ``step`` steps is written."""
    return run_directory / FOLDER / f"step-{step:08d}{_PARTIAL}"


def begin(partial: Path) -> None:
    """Create the directory for writing, empty; raise OSError if that fails, or it contains foreign files."""
    discard(partial)
    partial.mkdir(parents=True)
    _sync(partial.parent.parent)


def discard(path: Path) -> None:
    """Delete a directory without a final name, if it exists; raise OSError if that fails, or it has foreign files."""
    if os.path.lexists(path):
        remove(path, _is_ours)


def publish(partial: Path) -> Path:
    """Give a directory whose files are on disk its final name; replace an older checkpoint of the same step.

    Raise OSError if it cannot be renamed, or the older one contains foreign files.
    """
    final = partial.with_suffix("")
    _sync(partial)
    replaced = _set_aside(final) if os.path.lexists(final) else None
    partial.rename(final)  # if killed before this, both remain, and remove_partial() renames
    _sync(final.parent)
    if replaced:
        remove(replaced, _is_ours)
    return final


def prune(run_directory: Path, keep: int, broken: Container[Path] = ()) -> None:
    """Delete all complete checkpoints except the newest ``keep``; may raise OSError.

    ``broken`` checkpoints, and those with files of the wrong size, are neither counted nor deleted. Checkpoints with
    foreign files, or tensors not in the manifest, are not deleted.
    """
    candidates = [(path, _manifest_if_complete(path)) for path in _published(run_directory) if path not in broken]
    for path, manifest in [(path, manifest) for path, manifest in candidates if manifest][keep:]:
        tensors = {file.name for file in path.glob("*.distcp")}
        if tensors <= manifest.files.keys() and not first_foreign_entry(path, _is_ours):
            remove(_set_aside(path), _is_ours)


def remove_partial(run_directory: Path) -> None:
    """Clean up after a killed run; called in one process, before the run starts. May raise OSError.

    A complete checkpoint gets its final name; one with foreign files is left unchanged.
    """
    for path in sorted((run_directory / FOLDER).glob("step-*"), reverse=True):  # partial before deleted
        named = _STEP.fullmatch(path.stem) and path.suffix in (_PARTIAL, _DELETED)
        if not named or first_foreign_entry(path, _is_ours):
            continue
        final = path.with_suffix("")
        if path.suffix == _PARTIAL and not os.path.lexists(final) and _manifest_if_complete(path):
            publish(path)
        else:
            remove(path, _is_ours)


def _is_ours(name: str) -> bool:
    return bool(_FILE.fullmatch(name))


def _published(run_directory: Path) -> list[Path]:
    """Return directories with a final name, newest first."""
    named = (path for path in (run_directory / FOLDER).glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir())
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _manifest_if_complete(path: Path) -> Manifest | None:
    """Return the manifest if all files exist with the expected sizes."""
    with suppress(BrokenCheckpoint):
        return verify(path, shares=0)
    return None


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint, to delete it; raise OSError if it contains foreign files."""
    if other := first_foreign_entry(path, _is_ours):
        raise foreign_path_error(other)
    aside = path.with_name(path.name + _DELETED)
    discard(aside)
    return path.rename(aside)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
