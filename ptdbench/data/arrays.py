"""Labeled images that fit into memory: a stream and a held-out part from arrays, shifted and mirrored by number.

torchvision's transforms draw from one global generator. Here the augmentation of a sample depends only on the seed and
its number, for any layout and after a resume.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ptdbench.data.protocol import Batch, HeldOut, HeldOutPart, Images, draws, shuffled
from ptdbench.problems import Problem, try_these

Pixels = npt.NDArray[np.uint8]  # shape (B, H, W, 3)


class Labeled(NamedTuple):
    """Images and their labels."""

    images: Pixels  # uint8 of shape (N, H, W, 3)
    labels: npt.NDArray[np.int64]  # shape (N,)

    def digest(self) -> str:
        """SHA-256 of shape, pixels and labels, in hexadecimal digits."""
        digest = hashlib.sha256(repr(self.images.shape).encode())
        for array in self:
            digest.update(array.tobytes())
        return digest.hexdigest()


class ImageArrays(Images):
    """A stream of images held in memory by every rank, reshuffled every epoch, randomly shifted and mirrored.

    A subclass defines :meth:`read` and the attributes below.
    """

    mean: ClassVar[Sequence[float]]  #: Mean red, green and blue of the training images, where white is 1.
    std: ClassVar[Sequence[float]]  #: Their standard deviations, in the same unit.
    classes: ClassVar[int]  #: Number of different labels.

    def __init__(self, *, seed: int, padding: int, flip: bool, channels_last: bool) -> None:
        """Set options that the subclass has checked: ``padding`` is the largest shift of an image in pixels."""
        self.seed = seed
        self.padding = padding
        self.flip = flip
        self.channels_last = channels_last

    @abstractmethod
    def read(self, *, held_out: bool) -> Labeled:
        """Return the training images, or the held-out images, if any."""

    @property
    def held_out(self) -> HeldOut | None:
        """The held-out images, not augmented; ``None`` if there are none."""
        part = self._held_out

        def read(start: int, stop: int) -> Batch:
            return self.normalized(part.images[start:stop]), torch.from_numpy(part.labels[start:stop].copy())

        return HeldOutPart(len(part.labels), read) if len(part.labels) else None

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``: float32 images ``(B, 3, H, W)`` and int64 labels ``(B,)``."""
        chosen = shuffled(len(self._training.labels), self.seed, start, stop)
        images = shifted(
            self._training.images[chosen], seed=self.seed, start=start, padding=self.padding, flip=self.flip
        )
        return self.normalized(images), torch.from_numpy(self._training.labels[chosen])

    def normalized(self, images: Pixels) -> torch.Tensor:
        """Convert bytes of shape ``(B, H, W, 3)`` to the model's input: float32 of shape ``(B, 3, H, W)``."""
        return normalized(images, self.mean, self.std, channels_last=self.channels_last)

    def suiting(self, *, classes: int, image_size: int) -> list[Problem]:
        """Return the problems of a model with this number of classes and image size.

        It might run, but its loss would cover classes that never occur, and its FLOPs be of images of another size.
        """
        problems = []
        for option, value, needed in (("classes", classes, self.classes), ("image_size", image_size, self.image_size)):
            if value != needed:
                rule = f"comes from the model, and must be {needed}, as in these images"
                problems.append(Problem(option, value, rule, try_these([f"model.{option}={needed}"])))
        return problems

    @cached_property
    def _training(self) -> Labeled:
        return self.read(held_out=False)

    @cached_property
    def _held_out(self) -> Labeled:
        return self.read(held_out=True)


def shifted(images: Pixels, *, seed: int, start: int, padding: int, flip: bool) -> Pixels:
    """Shift each image by up to ``padding`` pixels in both directions, and mirror about half of them if ``flip``.

    This is a random crop, of the original size, from the image padded with black. It depends only on the seed and the
    image's number in the stream, counted from ``start``. The images are new, of the same shape.
    """
    count, height, width, _ = images.shape
    chance = draws(seed, start, start + count)
    places = np.uint64(2 * padding + 1)
    top, left = chance % places, chance // places % places
    moved = _crops(images, top.astype(np.intp), left.astype(np.intp), padding)
    if flip:
        mirrored = (chance % np.uint64(2)).astype(bool)  # independent of the remainders by an odd number above
        whole = moved.view("V3")  # three-byte pixels, which are faster to move than single bytes
        whole[mirrored] = whole[mirrored, :, ::-1]
    return moved.reshape(count, height, width, 3)


def normalized(
    images: Pixels, mean: Sequence[float], std: Sequence[float], *, channels_last: bool = True
) -> torch.Tensor:
    """Normalize bytes to ``(x / 255 - mean) / std`` by channel: float32 of shape ``(B, 3, H, W)``.

    ``torch.channels_last`` is fastest for convolutions and free here.
    """
    count, height, width, channels = images.shape
    mean_, std_ = torch.tensor(mean), torch.tensor(std)
    # Treat width and channels as one row: looping over a dimension as short as the channels costs more than the sums.
    rows = torch.from_numpy(images.reshape(count, height, width * channels)).to(torch.float32)
    rows.mul_((1 / (255 * std_)).repeat(width)).sub_((mean_ / std_).repeat(width))
    result = rows.view(count, height, width, channels).permute(0, 3, 1, 2)
    return result if channels_last else result.contiguous()


def _crops(images: Pixels, top: npt.NDArray[np.intp], left: npt.NDArray[np.intp], padding: int) -> Pixels:
    """Return the crop of each padded image that starts at row ``top`` and column ``left``, ``(B, H, 3 W)``."""
    count, height, width, channels = images.shape
    bordered = np.zeros((count, height + 2 * padding, width + 2 * padding, channels), np.uint8)
    bordered[:, padding : padding + height, padding : padding + width] = images
    rows = bordered.reshape(count, height + 2 * padding, (width + 2 * padding) * channels)
    windows = sliding_window_view(rows, (height, width * channels), axis=(1, 2))[:, :, ::channels]
    return windows[np.arange(count), top, left]  # type: ignore[no-any-return]
