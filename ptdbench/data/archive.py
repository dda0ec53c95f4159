"""A data set that comes as an archive: fetched and unpacked once, by one process, whole or not at all."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from ptdbench.data.lock import alone
from ptdbench.problems import ConfigError, Problem


@dataclass(frozen=True)
class Archive:
    """An archive that holds one folder of files, all of them known by their MD5.

    The problems that it raises are those of an option ``root``, beside which there is one ``download``.

    Attributes:
        root: The folder in which the archive lies, and into which it is unpacked.
        name: File name of the archive.
        md5: MD5 of the archive, in hexadecimal digits.
        url: Where it can be had.
        folder: Name of the folder in it.
        files: Name and MD5 of each file in the folder that is needed.
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

        with _scratch(archive) as scratch:
            try:
                download_url(self.url, str(scratch), self.name, self.md5)
            except (OSError, RuntimeError, HTTPException) as error:  # RuntimeError: the MD5 is another
                rule = f"{self.url} could not be downloaded: {error}"
                remedy = f"put {self.name} into {self.root}, which needs no download"
                raise ConfigError([Problem("download", True, rule, remedy)]) from error
            (scratch / self.name).replace(archive)

    def _unpack(self) -> None:
        from torchvision.datasets.utils import extract_archive

        target = self.root / self.folder
        with _scratch(target) as scratch:
            extract_archive(str(self.root / self.name), str(scratch))
            # A lock may not reach other hosts of a network file system, and one of them may have been faster.
            if self.is_unpacked():
                return
            if target.exists():
                target.rename(scratch / "broken")
            (scratch / self.folder).rename(target)

    def _holds_all(self, folder: Path) -> bool:
        from torchvision.datasets.utils import check_integrity

        return all(check_integrity(folder / name, md5) for name, md5 in self.files)

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


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target``, which is gone afterwards.

    The caller holds the lock, and the folder carries the host's name, as the lock may not reach other hosts: so what
    is found there was left by a process of this host that was killed.
    """
    folder = target.with_name(f"{target.name}.{platform.node()}.partial")
    _remove(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
