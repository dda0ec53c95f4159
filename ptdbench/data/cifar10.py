"""CIFAR-10: 60,000 photographs of 32x32 pixels in ten classes."""

import hashlib
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ptdbench.data.arrays import ImageArrays, Labeled
from ptdbench.data.protocol import missing_folder
from ptdbench.files import user_cache
from ptdbench.problems import ConfigError, Problem, at_least, require


class Cifar10(ImageArrays):
    """The data set of Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).

    Its 50,000 training images are shifted and mirrored at random; its 10,000 test images are held out. The root holds
    ``cifar-10-batches-py``, or the archive ``cifar-10-python.tar.gz``, which is then unpacked there. Its files are
    pickles, which can run code when read: they are read only after their checksums are verified.
    """

    # Over all pixels of the 50,000 training images: https://github.com/kuangliu/pytorch-cifar/issues/135. The smaller
    # standard deviations in common use, (0.2023, 0.1994, 0.2010), are means of each image's own.
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    image_size = 32
    classes = 10

    def __init__(
        self,
        *,
        seed: int,
        root: str | None = None,
        download: bool = False,
        padding: int = 4,
        flip: bool = True,
        channels_last: bool = True,
        classes: int = 10,
        image_size: int = 32,
    ) -> None:
        """Check the options of ``conf/data/cifar10.yaml``; raise ConfigError with every invalid one."""
        remedy = "set data.root=FOLDER with cifar-10-python.tar.gz or cifar-10-batches-py in it, or data.download=true"
        require(
            *at_least(0, seed=seed, padding=padding),
            None if download else missing_folder(root, "CIFAR-10", remedy),
            *self.suiting(classes=classes, image_size=image_size),
        )
        super().__init__(seed=seed, padding=padding, flip=flip, channels_last=channels_last)
        self.root = user_cache() / "cifar-10" if root is None else Path(root).expanduser().resolve()
        self.download = download

    def reader(self) -> Any:
        """Return the class that reads the files and knows their checksums: ``torchvision.datasets.CIFAR10``."""
        from torchvision.datasets import CIFAR10

        return CIFAR10

    @property
    def identity(self) -> str:
        """A digest of the checksums of all files, which are verified when the files are read."""
        reader = self.reader()
        checksums = [md5 for _, md5 in (*reader.train_list, *reader.test_list)]
        return hashlib.sha256("".join([*checksums, reader.meta["md5"]]).encode()).hexdigest()

    def prepare(self) -> None:
        """Unpack the archive, after downloading it if ``download`` is set, unless all files exist.

        Of several processes, one does the work, and the others wait.

        Raises:
            ConfigError: There is no complete archive, it cannot be downloaded, or the folder is not writable.
        """
        from torchvision.datasets.utils import check_integrity, download_and_extract_archive

        if self._is_unpacked():
            return
        reader = self.reader()
        if not self.download and not check_integrity(self.root / reader.filename, reader.tgz_md5):
            rule = f"has neither {reader.base_folder} nor {reader.filename}, complete and unchanged"
            remedy = "put a complete archive there, or set data.download=true"
            raise ConfigError([Problem("root", self.root, rule, remedy)])
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f"{reader.base_folder}.lock", fallback_to_soft=False):
                if not self._is_unpacked():  # another process may have done it meanwhile
                    download_and_extract_archive(reader.url, self.root, filename=reader.filename, md5=reader.tgz_md5)
        except (OSError, RuntimeError, HTTPException) as error:  # RuntimeError: the MD5 of the download is wrong
            rule = f"cannot {'download or ' if self.download else ''}unpack {reader.filename}: {error}"
            remedy = "put a complete archive there" if self.download else ""
            raise ConfigError([Problem("root", self.root, rule, remedy)]) from error

    def read(self, *, held_out: bool) -> Labeled:
        """Return one part of the images; raise ConfigError if files are missing or were changed."""
        try:
            images = self.reader()(self.root, train=not held_out)
        except RuntimeError as error:  # raised before reading a file with a wrong checksum
            rule = f"its {self.reader().base_folder} has missing or changed files"
            raise ConfigError([Problem("root", self.root, rule)]) from error
        return Labeled(np.ascontiguousarray(images.data), np.array(images.targets, np.int64))

    def _is_unpacked(self) -> bool:
        with suppress(RuntimeError):
            self.reader()(self.root)
            return True
        return False
