"""Image files in one folder per class, as in ImageNet and most collections."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ptdbench.data.arrays import Pixels, normalized
from ptdbench.data.protocol import Batch, HeldOut, HeldOutPart, Images, draws, missing_folder, shuffled
from ptdbench.launch.settings import own_cores
from ptdbench.problems import ConfigError, Problem, at_least, require, try_these

if TYPE_CHECKING:
    from torchvision import datasets

# Statistics of ImageNet's training images, with which torchvision's weights were trained
# (https://docs.pytorch.org/vision/stable/models.html).
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

#: Ranges of torchvision's ``RandomResizedCrop``: fractions of an image's area, and logarithms of width over height.
_SCALE, _LOG_RATIO = (0.08, 1.0), tuple(torch.log(torch.tensor((3 / 4, 4 / 3))).tolist())

_MOST_WORKERS = 8  # per rank; each keeps prefetched batches in memory


class ImageFolder(Images):
    """A stream of image files, reshuffled every epoch, with a random resized crop of each.

    There is a folder for each class, with files at any depth, in any format that torchvision's ``ImageFolder`` reads.
    Transforms are as in torchvision's ImageNet references: ``RandomResizedCrop`` and ``RandomHorizontalFlip`` for
    training, ``Resize`` and ``CenterCrop`` for held-out images.
    """

    def __init__(
        self,
        *,
        root: str | None,
        classes: int,
        image_size: int,
        seed: int,
        train: str = "train",
        val: str = "val",
        workers: int | Literal["auto"] = "auto",
        channels_last: bool = True,
    ) -> None:
        """Check the options of ``conf/data/image_folder.yaml``; raise ConfigError with every invalid one."""
        require(
            *at_least(1, classes=classes, image_size=image_size),
            *at_least(0, seed=seed),
            *([] if workers == "auto" else at_least(0, workers=workers)),
            missing_folder(root, "the images", _with_images(train), inside=train),
        )
        assert root is not None
        self.root = Path(root).expanduser().resolve()
        self.classes = classes
        self.image_size = image_size
        self.seed = seed
        self.channels_last = channels_last
        self._train = train
        self._val = val
        self._wanted_workers = workers

    @cached_property
    def workers(self) -> int:  # type: ignore[override] # not known before the rank is bound to its cores
        """Number of worker processes of this rank; ``auto`` is one less than its share of cores, from 1 to 8."""
        if self._wanted_workers != "auto":
            return self._wanted_workers
        # A rank that is not bound to cores has its share as a number of threads.
        share = min(len(own_cores()), torch.get_num_threads())
        return min(max(share - 1, 1), _MOST_WORKERS)

    @property
    def held_out(self) -> HeldOut | None:
        """The center crops of the images in ``val``; ``None`` if there is no such folder."""
        if (files := self._held_out) is None:
            return None
        from torchvision.transforms import v2

        middle = v2.Compose([v2.Resize(self.image_size * 256 // 224), v2.CenterCrop(self.image_size)])

        def middles(start: int, stop: int) -> Batch:
            # Threads suffice: nothing is drawn here, and decoding releases the GIL.
            with ThreadPoolExecutor(max(self.workers, 1)) as threads:
                images = list(threads.map(lambda sample: read(sample[0], middle), files.samples[start:stop]))
            return self.batch(images), torch.tensor(files.targets[start:stop])

        return HeldOutPart(len(files), middles)

    @cached_property
    def identity(self) -> str:
        """A digest of the names and sizes of all training and held-out files, by a stat of each."""
        parts = filter(None, (self._training, self._held_out))
        return hashlib.sha256("".join(map(_digest, parts)).encode()).hexdigest()

    def prepare(self) -> None:
        """List the folders.

        Raises:
            ConfigError: There are no images, or none in the folder of a class; the number of classes differs from the
                model's; or ``val`` has different classes.
        """
        _ = self._training, self._held_out

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``: float32 images ``(B, 3, H, W)`` and int64 labels ``(B,)``.

        Raises:
            ValueError: A file cannot be read as an image; the message names it.
        """
        chosen = shuffled(len(self._training), self.seed, start, stop)
        chances = draws(self.seed, start, stop).tolist()
        paths, labels = zip(*(self._training.samples[index] for index in chosen), strict=True) if chances else ((), ())
        images = [
            read(path, partial(self._augmented, chance=chance)) for path, chance in zip(paths, chances, strict=True)
        ]
        return self.batch(images), torch.tensor(labels, dtype=torch.int64)

    def batch(self, images: list[Pixels]) -> torch.Tensor:
        """Convert images of shape ``(H, W, 3)`` to the model's input: float32 of shape ``(B, 3, H, W)``."""
        size = self.image_size
        together = np.stack(images) if images else np.empty((0, size, size, 3), np.uint8)
        return normalized(together, MEAN, STD, channels_last=self.channels_last)

    def _augmented(self, image: Any, chance: int) -> Any:
        """Apply ``RandomResizedCrop`` and ``RandomHorizontalFlip`` to an image as after ``manual_seed(chance)``.

        torchvision's transforms draw from the global generator, which activation checkpointing sets in another thread.
        """
        from torchvision.transforms.v2 import functional

        generator = torch.Generator().manual_seed(chance)
        image = functional.resized_crop(image, *_crop(image.width, image.height, generator), [self.image_size] * 2)
        return image if torch.rand(1, generator=generator) >= 0.5 else functional.horizontal_flip(image)

    @cached_property
    def _training(self) -> datasets.ImageFolder:
        files = _list(self.root, self._train)
        if len(files.classes) != self.classes:
            rule = f"{self.root / self._train} has {len(files.classes)} folders, one for each class"
            remedy = try_these([f"model.classes={len(files.classes)}"])
            raise ConfigError([Problem("classes", self.classes, rule, remedy)])
        return files

    @cached_property
    def _held_out(self) -> datasets.ImageFolder | None:
        if not (self.root / self._val).is_dir():
            return None
        files = _list(self.root, self._val)
        # Labels are indices of the folders, so that both parts must have the same folders.
        if different := sorted(set(files.classes) ^ set(self._training.classes)):
            parts = f"{self._train} and {self._val}"
            rule = f"{parts} must have the same folders, but only one has {different[0]}"
            remedy = try_these([f"data.val=FOLDER with the folders of {self._train}"])
            raise ConfigError([Problem("root", self.root, rule, remedy)])
        return files


def read(path: str, transform: Callable[[Any], Any]) -> Pixels:
    """Read and transform an image: uint8 of shape ``(H, W, 3)``; raise ValueError if the file is not an image."""
    from torchvision.datasets.folder import pil_loader

    try:
        image = pil_loader(path)
    except Exception as error:  # the exception type depends on the decoder
        raise ValueError(f"cannot read {path} as an image: {error}") from error
    return np.asarray(transform(image))


def _crop(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a crop as torchvision's ``RandomResizedCrop``."""
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(*_SCALE, generator=generator).item()
        ratio = torch.exp(torch.empty(1).uniform_(*_LOG_RATIO, generator=generator)).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = (int(torch.randint(most + 1, (1,), generator=generator)) for most in (height - h, width - w))
            return top, left, h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))  # the center of a narrow image
    return (height - h) // 2, (width - w) // 2, h, w


def _digest(images: datasets.ImageFolder) -> str:
    """Return the SHA-256 of the name and the size in bytes of every file, in hexadecimal digits."""
    paths = [path for path, _ in images.samples]
    names = [os.fsencode(os.path.relpath(path, images.root)) for path in paths]
    sizes = np.array([os.stat(path).st_size for path in paths], np.int64)
    return hashlib.sha256(b"\0".join([*names, sizes.tobytes()])).hexdigest()


def _with_images(folder: str) -> str:
    return f"try data.root=FOLDER with {folder}/CLASS/IMAGE.jpg in it"


def _list(root: Path, folder: str) -> datasets.ImageFolder:
    """Return the images in a folder of the root; raise ConfigError if there are none, or none for a class."""
    from torchvision import datasets

    try:
        return datasets.ImageFolder(root / folder)
    except OSError as error:  # FileNotFoundError also if an existing folder has no images
        raise ConfigError([Problem("root", root, f"{root / folder}: {error}", _with_images(folder))]) from error
