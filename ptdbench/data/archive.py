"""A data set in an archive: downloaded and unpacked once, by one process, atomically.

Its folder may belong to a user and hold other files: no file is overwritten or deleted, and a modified one is kept
beside the correct one.
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

from filelock import FileLock

from ptdbench.problems import ConfigError, Problem
from ptdbench.removal import remove


@dataclass(frozen=True)
class Archive:
    """A tar archive of one folder of files, each with a known MD5.

    Its problems refer to the options ``root`` and ``download``.

    Attributes:
        root: The folder of the archive, into which it is unpacked.
        name: File name of the archive.
        md5: MD5 of the archive, in hexadecimal digits.
        url: Where to download it.
        folder: Name of the folder in it.
        files: Name and MD5 of each needed file in the folder; no others are unpacked.
    """

    root: Path
    name: str
    md5: str
    url: str
    folder: str
    files: Sequence[tuple[str, str]]

    def is_unpacked(self) -> bool:
        """Whether all files exist and match their checksums."""
        return self._holds_all(self.root / self.folder)

    def provide(self, *, download: bool) -> None:
        """Unpack the archive unless that is done, after downloading it if it is missing and ``download`` is set.

        May be called by several processes at once, also on several hosts. If the files exist, nothing is written.

        Raises:
            ConfigError: There is no archive or a wrong one, it cannot be downloaded, or the folder is not writable.
        """
        if self.is_unpacked():
            return
        with self._blaming_root():
            if download:
                self.root.mkdir(parents=True, exist_ok=True)
            elif not (self.root / self.name).is_file():
                raise ConfigError([self._absent()])
            with FileLock(self.root / f"{self.folder}.lock", fallback_to_soft=False):
                # After waiting for the lock, the work may be done.
                if not self.is_unpacked():
                    self._fetch()
                    self._unpack()

    def _fetch(self) -> None:
        """Ensure that the correct archive is in the root."""
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
            # A lock may not work across hosts of a network file system, and another host may have been faster.
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
        """Turn an OSError into a problem of the option ``root``."""
        try:
            yield
        except OSError as error:
            raise ConfigError([Problem("root", self.root, str(error))]) from error


_DOWNLOAD = "give data.download=true"


def _is_whole(path: Path, md5: str) -> bool:
    from torchvision.datasets.utils import check_integrity

    return check_integrity(path, md5)


def _keep_aside(path: Path) -> None:
    """Rename a file, if it exists, to a free name."""
    if os.path.lexists(path):
        others = (path.with_name(f"{path.name}.broken{number or ''}") for number in itertools.count())
        path.rename(next(other for other in others if not os.path.lexists(other)))


@contextmanager
def _scratch(target: Path, names: Collection[str]) -> Iterator[Path]:
    """An empty temporary folder beside ``target`` for files of these names.

    The caller holds the lock, and the folder has the host's name, as the lock may not work across hosts: files of
    these names found there were left by a killed process of this host.

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
