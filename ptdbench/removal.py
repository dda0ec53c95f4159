"""Safe deletion.

The program deletes only files that it created, one by one, by name, and never a directory that holds anything else.
Users put notes beside results, replace checkpoints by links to other disks, and point options at their own folders;
none of that is deleted, overwritten or renamed. All code that deletes a directory calls this module, and nothing
deletes a tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def stranger(directory: Path, is_ours: Callable[[str], bool]) -> Path | None:
    """The first entry of a directory, by name, that the program did not create: not a regular file of such a name.

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
    """The error for a path that is occupied by something the program did not create."""
    return FileExistsError(f"{path} was not created by ptdbench: move it elsewhere")


def remove(directory: Path, is_ours: Callable[[str], bool]) -> None:
    """Delete a directory that holds only the program's own files; any other directory is left unchanged.

    Raises:
        FileExistsError: It holds something else, or is not a directory.
        OSError: It cannot be deleted, or something was put into it meanwhile, which is kept.
    """
    if other := stranger(directory, is_ours):
        raise in_the_way(other)
    for name in filter(is_ours, os.listdir(directory)):
        (directory / name).unlink()
    directory.rmdir()
