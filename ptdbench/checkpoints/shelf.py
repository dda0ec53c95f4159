"""A run's checkpoints on disk: ``checkpoints/step-00000100/``, and ``.partial`` behind the name while it is written.

A directory gets its final name when everything in it is on disk, and loses it before anything in it is deleted. So
whoever is killed at any moment leaves no half checkpoint that looks whole. What holds anything that is not the saver's,
such as a person's notes, is neither deleted nor renamed; see :mod:`ptdbench.removal`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ptdbench.checkpoints import manifest
from ptdbench.checkpoints.manifest import Broken, Manifest
from ptdbench.checkpoints.together import gathered, place
from ptdbench.removal import in_the_way, remove, stranger

FOLDER = "checkpoints"
BEST = "best"

_PARTIAL, _DELETED = ".partial", ".deleted"

_STEP = re.compile(r"step-(\d{8,})")

#: Every name that the saver gives to a file, those that it has only while it is written included.
_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json|\.manifest\.json\.[0-9a-f]{8}\.tmp")


@dataclass(frozen=True)
class Found:
    """A checkpoint that counts.

    Attributes:
        path: Its directory.
        manifest: What it says of itself.
    """

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Search:
    """What a search for the newest checkpoint came to.

    Attributes:
        found: The newest that counts, if there is one.
        warnings: For each newer one that was passed over, which file is broken and how.
    """

    found: Found | None
    warnings: tuple[str, ...]


def newest(run_directory: Path, group: dist.ProcessGroup | None = None) -> Search:
    """The newest checkpoint of a run that is complete and matches its checksums; called in all ranks of ``group``.

    Everyone looks at names and sizes; the files are read once, shared out over the ranks. All come to the same result.

    Args:
        run_directory: The run's directory.
        group: Ranks that search together, on the CPU; without one this process is alone.
    """
    warnings: list[str] = []
    # Rank 0's list: a network file system may show another host an older one.
    for name in gathered([path.name for path in _complete_by_name(run_directory)], group)[0]:
        path = run_directory / FOLDER / name
        found, fault = _examine(path, *place(group))
        faults = list(dict.fromkeys(of_rank for of_rank in gathered(fault, group) if of_rank))
        if found and not faults:
            return Search(Found(path, found), tuple(warnings))
        warnings.append(f"{path} is skipped: {'; '.join(faults)}")
    return Search(None, tuple(warnings))


def glance(run_directory: Path) -> Manifest | None:
    """What the newest checkpoint that seems whole says of itself; its files are not read, so that this is quick."""
    whole = (path for path in _complete_by_name(run_directory) if _is_whole(path))
    return next((manifest.read(path) for path in whole), None)


def partial(run_directory: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps is written."""
    return run_directory / FOLDER / f"{_name(step)}{_PARTIAL}"


def begin(partial: Path) -> None:
    """Make that directory, empty.

    Raises:
        OSError: It cannot be made, or holds something that the saver has not written.
    """
    discard(partial)
    partial.mkdir(parents=True)
    _sync(partial.parent.parent)


def discard(path: Path) -> None:
    """Delete a directory without a final name, if it is there.

    Raises:
        OSError: It cannot be deleted, or holds something that the saver has not written.
    """
    if os.path.lexists(path):
        remove(path, _is_ours)


def publish(partial: Path) -> Path:
    """Give a directory whose files are on disk its final name; an older checkpoint of the same step makes room.

    Raises:
        OSError: It cannot be renamed, or the older one holds something that the saver has not written.
    """
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    _sync(partial)
    replaced = _set_aside(final) if os.path.lexists(final) else None
    partial.rename(final)  # whoever is killed before has left both, and sweep_partial() does this then
    _sync(final.parent)
    if replaced:
        remove(replaced, _is_ours)
    return final


def prune(run_directory: Path, keep: int, best: int | None = None) -> None:
    """Delete all complete checkpoints but the newest ``keep`` and that of step ``best``.

    Broken ones neither count nor go. Nor does one go in which there is anything but what its manifest names.

    Raises:
        OSError: One cannot be deleted.
    """
    whole = [path for path in _complete_by_name(run_directory) if _is_whole(path)]
    for path in whole[keep:]:
        if path.name != _name(best) and _holds_what_it_names(path):
            remove(_set_aside(path), _is_ours)


def mark_best(run_directory: Path, step: int) -> None:
    """Let the link ``checkpoints/best`` lead to the checkpoint after ``step`` steps, if that is there.

    Raises:
        OSError: It cannot be made, or something that is no link to a checkpoint has its name.
    """
    folder = run_directory / FOLDER
    if not (folder / _name(step)).exists():
        return
    best, fresh = folder / BEST, folder / f"{BEST}.new"
    for path in (best, fresh):
        if os.path.lexists(path) and not (path.is_symlink() and _STEP.fullmatch(os.readlink(path))):
            raise in_the_way(path)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(_name(step))
    fresh.replace(best)


def sweep_partial(run_directory: Path) -> None:
    """Clear away what a killed run left unfinished; for one process, before the run starts.

    What was complete but for its name gets that. What holds anything that the saver has not written stays as it is.

    Raises:
        OSError: Something cannot be removed.
    """
    for path in _left(run_directory, _PARTIAL):
        if _is_whole(path) and not os.path.lexists(path.with_name(path.name.removesuffix(_PARTIAL))):
            publish(path)
        else:
            remove(path, _is_ours)
    for path in _left(run_directory, _DELETED):
        remove(path, _is_ours)


def _name(step: int | None) -> str:
    return "" if step is None else f"step-{step:08d}"


def _is_ours(name: str) -> bool:
    """Whether the saver gives that name to files."""
    return bool(_FILE.fullmatch(name))


def _left(run_directory: Path, suffix: str) -> list[Path]:
    """Directories with that end of their names that hold nothing but what the saver writes."""
    named = sorted((run_directory / FOLDER).glob(f"step-*{suffix}"))
    return [path for path in named if _STEP.fullmatch(path.name.removesuffix(suffix)) and not stranger(path, _is_ours)]


def _complete_by_name(run_directory: Path) -> list[Path]:
    """What bears a final name, newest first."""
    folder = run_directory / FOLDER
    steps = {path: _STEP.fullmatch(path.name) for path in folder.glob("step-*") if path.is_dir()}
    numbered = {path: int(found[1]) for path, found in steps.items() if found}
    return sorted(numbered, key=lambda path: numbered[path], reverse=True)


def _examine(path: Path, rank: int, size: int) -> tuple[Manifest | None, str | None]:
    """The manifest of a checkpoint as one of several ranks sees it, or what is wrong."""
    try:
        found = manifest.read(path)
        manifest.check_sizes(path, found)
        manifest.check_contents(path, found, rank, size)
    except Broken as fault:
        return None, str(fault)
    return found, None


def _is_whole(path: Path) -> bool:
    """Whether all files are there and have their sizes; reading them all would take too long."""
    try:
        manifest.check_sizes(path, manifest.read(path))
    except Broken:
        return False
    return True


def _holds_what_it_names(path: Path) -> bool:
    """Whether there is nothing in a whole checkpoint but what its manifest names."""
    named = {*manifest.read(path).files, manifest.MANIFEST}
    return not stranger(path, lambda name: _is_ours(name) and name in named)


def _set_aside(path: Path) -> Path:
    """Take a checkpoint's name away, so that it can be deleted.

    Raises:
        OSError: It holds something that the saver has not written, or so does what was set aside before.
    """
    if other := stranger(path, _is_ours):
        raise in_the_way(other)
    aside = path.with_name(path.name + _DELETED)
    discard(aside)
    return path.rename(aside)


def _sync(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
