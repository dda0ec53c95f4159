"""A run's checkpoints on disk: ``checkpoints/step-00000100/``, and ``.partial`` behind the name while it is written.

A directory gets its final name when everything in it is on disk, and loses it before anything in it is deleted. So
whoever is killed at any moment leaves no half checkpoint that looks whole.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ptdbench.checkpoints import manifest
from ptdbench.checkpoints.manifest import Broken, Manifest
from ptdbench.checkpoints.together import gathered, place

FOLDER = "checkpoints"
BEST = "best"

_PARTIAL, _DELETED = ".partial", ".deleted"


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
        warnings.append(f"{path} is passed over: {'; '.join(faults)}")
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
        OSError: It cannot be made.
    """
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    _sync(partial.parent.parent)


def publish(partial: Path) -> Path:
    """Give a directory whose files are on disk its final name; an older checkpoint of the same step makes room.

    Raises:
        OSError: It cannot be renamed.
    """
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    _sync(partial)
    replaced = _set_aside(final) if final.exists() else None
    partial.rename(final)  # whoever is killed before has left both, and sweep_partial() does this then
    _sync(final.parent)
    if replaced:
        shutil.rmtree(replaced)
    return final


def prune(run_directory: Path, keep: int, best: int | None = None) -> None:
    """Delete all complete checkpoints but the newest ``keep`` and that of step ``best``.

    Broken ones neither count nor go.

    Raises:
        OSError: One cannot be deleted.
    """
    whole = [path for path in _complete_by_name(run_directory) if _is_whole(path)]
    for path in whole[keep:]:
        if path.name != _name(best):
            shutil.rmtree(_set_aside(path))


def mark_best(run_directory: Path, step: int) -> None:
    """Let the link ``checkpoints/best`` lead to the checkpoint after ``step`` steps, if that is there.

    Raises:
        OSError: It cannot be made.
    """
    folder = run_directory / FOLDER
    if not (folder / _name(step)).exists():
        return
    fresh = folder / f"{BEST}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(_name(step))
    fresh.replace(folder / BEST)


def sweep_partial(run_directory: Path) -> None:
    """Clear away what a killed run left unfinished; for one process, before the run starts.

    What was complete but for its name gets that.

    Raises:
        OSError: Something cannot be removed.
    """
    folder = run_directory / FOLDER
    for path in sorted(folder.glob(f"step-*{_PARTIAL}")):
        final = path.with_name(path.name.removesuffix(_PARTIAL))
        if _is_whole(path) and not final.exists():
            publish(path)
        else:
            shutil.rmtree(path)
    for path in folder.glob(f"step-*{_DELETED}"):
        shutil.rmtree(path)


def _name(step: int | None) -> str:
    return "" if step is None else f"step-{step:08d}"


def _complete_by_name(run_directory: Path) -> list[Path]:
    """What bears a final name, newest first."""
    folder = run_directory / FOLDER
    steps = {path: re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.glob("step-*") if path.is_dir()}
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


def _set_aside(path: Path) -> Path:
    """Take a checkpoint's name away, so that it can be deleted."""
    aside = path.with_name(path.name + _DELETED)
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def _sync(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
