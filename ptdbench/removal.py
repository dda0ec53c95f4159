"""Deleting.

The rule: the program deletes only what it has made itself, file by file, by the names that it gives, and never a
directory that holds anything else. People put their notes beside results, move checkpoints to other disks and leave
links, and point options at folders of theirs; nothing of that is deleted, overwritten or renamed. So whoever deletes a
directory comes here, and nothing deletes a tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def stranger(directory: Path, is_ours: Callable[[str], bool]) -> Path | None:
    """What is not the program's own in a directory, the first by name: all but regular files of such names.

    It is the path itself where that is no directory, but a file or a link to one.

    Raises:
        OSError: The directory cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return directory
    with os.scandir(directory) as entries:
        others = [entry.path for entry in entries if not (is_ours(entry.name) and entry.is_file(follow_symlinks=False))]
    return Path(min(others)) if others else None


def in_the_way(path: Path) -> FileExistsError:
    """The error of whoever needs a place that something of somebody else's has taken."""
    return FileExistsError(f"{path} is not from ptdbench and in its way: move it elsewhere")


def remove(directory: Path, is_ours: Callable[[str], bool]) -> None:
    """Delete a directory that holds nothing but the program's own files; anything else stays as it is, in full.

    Raises:
        FileExistsError: There is something else in it, or it is no directory.
        OSError: It cannot be deleted. Also where something was put into it meanwhile, which stays.
    """
    if other := stranger(directory, is_ours):
        raise in_the_way(other)
    for name in filter(is_ours, os.listdir(directory)):
        (directory / name).unlink()
    directory.rmdir()
