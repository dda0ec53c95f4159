"""Handwritten digits included in scikit-learn: real images without a download."""

import hashlib
from functools import cached_property

import numpy as np

from ptdbench.data.arrays import ImageArrays, Labeled
from ptdbench.problems import Problem, at_least, require

_IMAGES = 1797
_WHITE = 16  # the largest pixel value


class Digits(ImageArrays):
    """The 1,797 digits of ``sklearn.datasets.load_digits``, 8x8 pixels in 17 shades of gray, each in three channels.

    They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI Machine
    Learning Repository). A fraction of each digit is held out, whatever the run's seed: none, or 10 to 1787 images, so
    that every digit is in both parts. Images are shifted, but not mirrored, as mirrored digits are not digits.
    """

    # Of all 1,797 images.
    mean = (0.3053,) * 3
    std = (0.3760,) * 3
    image_size = 8
    classes = 10

    def __init__(
        self,
        *,
        seed: int,
        held_out: int = 360,
        shift: int = 1,
        channels_last: bool = True,
        classes: int = 10,
        image_size: int = 8,
    ) -> None:
        """Check the options of ``conf/data/digits.yaml``; raise ConfigError with every invalid one."""
        require(
            *at_least(0, seed=seed, shift=shift),
            _must_leave_all_digits(held_out),
            *self.suiting(classes=classes, image_size=image_size),
        )
        super().__init__(seed=seed, padding=shift, flip=False, channels_last=channels_last)
        self._count = held_out

    @property
    def identity(self) -> str:
        """A digest of all images and labels, in training and held out."""
        return hashlib.sha256("".join(part.digest() for part in self._parts).encode()).hexdigest()

    def read(self, *, held_out: bool) -> Labeled:
        """Return the training images or the held-out images."""
        return self._parts[held_out]

    @cached_property
    def _parts(self) -> tuple[Labeled, Labeled]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        grey = np.rint(digits.images * (255 / _WHITE)).astype(np.uint8)
        images, labels = grey[..., np.newaxis].repeat(3, axis=-1), digits.target.astype(np.int64)
        training, held_out = np.arange(len(labels)), np.arange(0)
        if self._count:  # the split is the same for every seed of a run
            training, held_out = train_test_split(training, test_size=self._count, random_state=0, stratify=labels)
        return Labeled(images[training], labels[training]), Labeled(images[held_out], labels[held_out])


def _must_leave_all_digits(held_out: int) -> Problem | None:
    most = _IMAGES - Digits.classes
    if not at_least(0, held_out=held_out) and (held_out == 0 or Digits.classes <= held_out <= most):
        return None
    return Problem("held_out", held_out, f"must be 0, or {Digits.classes} to {most} of the {_IMAGES} images")
