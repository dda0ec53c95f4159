"""Labeled images that fit into memory: a stream and a held-out part from arrays."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ptdbench.data import sampling
from ptdbench.data.protocol import Batch, HeldOut, HeldOutPart, Images
from ptdbench.problems import Problem, try_these


class Labeled(NamedTuple):
    """Images and their labels."""

    images: sampling.Pixels  # uint8 of shape (N, H, W, 3)
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
        chosen = sampling.shuffled(len(self._training.labels), self.seed, start, stop)
        images = sampling.shifted(
            self._training.images[chosen], seed=self.seed, start=start, padding=self.padding, flip=self.flip
        )
        return self.normalized(images), torch.from_numpy(self._training.labels[chosen])

    def normalized(self, images: sampling.Pixels) -> torch.Tensor:
        """Convert bytes of shape ``(B, H, W, 3)`` to the model's input: float32 of shape ``(B, 3, H, W)``."""
        return sampling.normalized(images, self.mean, self.std, channels_last=self.channels_last)

    def suiting(self, *, classes: int, image_size: int) -> list[Problem]:
        """Return the problems of a model with this number of classes and image size.

        It might run, but its loss would cover classes that never occur, and its FLOPs be of images of another size.
        """
        problems = []
        for option, value, needed in (("classes", classes, self.classes), ("image_size", image_size, self.image_size)):
            if value != needed:
                rule = f"the model's must match these images, {needed}"
                problems.append(Problem(option, value, rule, try_these([f"model.{option}={needed}"])))
        return problems

    @cached_property
    def _training(self) -> Labeled:
        return self.read(held_out=False)

    @cached_property
    def _held_out(self) -> Labeled:
        return self.read(held_out=True)
