"""A data set that comes as an archive: fetched and unpacked once, by one process, whole or not at all.

The folder that holds it may be a person's, with more in it: no file is overwritten or deleted, and one that was changed
is kept beside the right one.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import tarfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from ptdbench.data.lock import alone
from ptdbench.problems import ConfigError, Problem
from ptdbench.removal import remove


@dataclass(frozen=True)
class Archive:
    """A tar archive that holds one folder of files, all of them known by their MD5.

    The problems that it raises are those of an option ``root``, beside which there is one ``download``.

    Attributes:
        root: The folder in which the archive lies, and into which it is unpacked.
        name: File name of the archive.
        md5: MD5 of the archive, in hexadecimal digits.
        url: Where it can be had.
        folder: Name of the folder in it.
        files: Name and MD5 of each file in the folder that is needed; no others are unpacked.
    """

    root: Path
    name: str
    md5: str
    url: str
    folder: str
    files: Sequence[tuple[str, str]]

    def is_unpacked(self) -> bool:
        """Whether all files are there, whole and unchanged."""
        return self._holds_all(self.root / self.folder)

    def provide(self, *, download: bool) -> None:
        """Unpack the archive unless that is done, and download it first if it is not there and ``download`` is set.

        May be called by several processes at once, also on several hosts. Where the files are there already, nothing
        is written.

        Raises:
            ConfigError: If there is no archive or it is not the one it should be, if it cannot be had, or if the
                folder cannot be written to.
        """
        if self.is_unpacked():
            return
        with self._blaming_root():
            if download:
                self.root.mkdir(parents=True, exist_ok=True)
            elif not (self.root / self.name).is_file():
                raise ConfigError([self._absent()])
            with alone(self.root / f"{self.folder}.lock"):
                # Whoever waited for the lock finds the work done.
                if not self.is_unpacked():
                    self._fetch()
                    self._unpack()

    def _fetch(self) -> None:
        """Leave an archive in the root that is the right one."""
        from torchvision.datasets.utils import calculate_md5

        archive = self.root / self.name
        if not archive.exists():
            self._download(archive)
        elif (found := calculate_md5(archive)) != self.md5:
            rule = f"the md5 of {archive} is {found} and must be {self.md5}: it is truncated or was changed"
            raise ConfigError(
                [Problem("root", self.root, rule, f"delete it and {_DOWNLOAD}, or put a whole one there")]
            )

    def _download(self, archive: Path) -> None:
        from torchvision.datasets.utils import download_url

        with _scratch(archive, {self.name}) as scratch:
            try:
                download_url(self.url, str(scratch), self.name, self.md5)
            except (OSError, RuntimeError, HTTPException) as error:  # RuntimeError: the MD5 is another
                rule = f"{self.url} could not be downloaded: {error}"
                remedy = f"put {self.name} into {self.root}, which needs no download"
                raise ConfigError([Problem("download", True, rule, remedy)]) from error
            (scratch / self.name).replace(archive)

    def _unpack(self) -> None:
        target = self.root / self.folder
        with _scratch(target, {name for name, _ in self.files}) as scratch:
            self._extract(scratch)
            # A lock may not reach other hosts of a network file system, and one of them may have been faster.
            if self.is_unpacked():
                return
            if not os.path.lexists(target):
                scratch.rename(target)
                return
            for name, md5 in self.files:
                if not _is_whole(target / name, md5):
                    _keep_aside(target / name)
                    (scratch / name).rename(target / name)

    def _extract(self, folder: Path) -> None:
        """Put the files into ``folder``."""
        names = {f"{self.folder}/{name}": name for name, _ in self.files}
        with tarfile.open(self.root / self.name) as archive:
            for member in archive:
                if member.name in names and (content := archive.extractfile(member)):
                    with (folder / names[member.name]).open("xb") as file:
                        shutil.copyfileobj(content, file)

    def _holds_all(self, folder: Path) -> bool:
        return all(_is_whole(folder / name, md5) for name, md5 in self.files)

    def _absent(self) -> Problem:
        broken = (self.root / self.folder).exists()
        rule = f"{self.root / self.folder} lacks files or was changed" if broken else f"there is no {self.folder} in it"
        return Problem("root", self.root, f"{rule}, and no {self.name}", f"put one there, or {_DOWNLOAD}")

    @contextmanager
    def _blaming_root(self) -> Iterator[None]:
        """Turn what the operating system refuses into a problem of the option that led there."""
        try:
            yield
        except OSError as error:
            raise ConfigError([Problem("root", self.root, str(error))]) from error


_DOWNLOAD = "give data.download=true"


def _is_whole(path: Path, md5: str) -> bool:
    from torchvision.datasets.utils import check_integrity

    return check_integrity(path, md5)


def _keep_aside(path: Path) -> None:
    """Give a file, if there is one, a name that is free."""
    if os.path.lexists(path):
        others = (path.with_name(f"{path.name}.broken{number or ''}") for number in itertools.count())
        path.rename(next(other for other in others if not os.path.lexists(other)))


@contextmanager
def _scratch(target: Path, names: Collection[str]) -> Iterator[Path]:
    """An empty folder beside ``target`` for files of these names, which is gone afterwards.

    The caller holds the lock, and the folder carries the host's name, as the lock may not reach other hosts: so files
    of these names that are found there were left by a process of this host that was killed.

    Raises:
        FileExistsError: Something else is there.
    """
    folder = target.with_name(f"{target.name}.{platform.node()}.partial")
    _remove(folder, names)
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder, names)


def _remove(folder: Path, names: Collection[str]) -> None:
    if os.path.lexists(folder):
        remove(folder, names.__contains__)
