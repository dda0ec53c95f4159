"""Augmentation and normalization of a batch of images, vectorized.

By hand: transforms of torchvision draw from one global generator, once for a whole batch; here what happens to a sample
depends on the seed and its number alone, for any layout and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ptdbench.data.sampling import draws

Pixels = npt.NDArray[np.uint8]  # shape (B, H, W, 3)


def shifted(images: Pixels, *, seed: int, start: int, padding: int, flip: bool) -> Pixels:
    """Move each image by up to ``padding`` pixels in both directions, and ``flip`` about half of them.

    This is a random crop, of the image's own size, from the image padded with black. It depends only on the seed and
    the image's number in the stream, which begins with ``start``, not on the batch.

    Returns:
        New images, uint8 of shape ``(B, H, W, 3)`` as those given.
    """
    count, height, width, _ = images.shape
    chance = draws(seed, start, start + count)
    places = np.uint64(2 * padding + 1)
    top, left = chance % places, chance // places % places
    moved = _crops(images, top.astype(np.intp), left.astype(np.intp), padding)
    if flip:
        mirrored = (chance % np.uint64(2)).astype(bool)  # of which the remainders by an odd number say nothing
        whole = moved.view("V3")  # pixels of three bytes, which are quicker to move than one byte after another
        whole[mirrored] = whole[mirrored, :, ::-1]
    return moved.reshape(count, height, width, 3)


def normalized(
    images: Pixels, mean: Sequence[float], std: Sequence[float], *, channels_last: bool = True
) -> torch.Tensor:
    """Turn bytes into the numbers that a model takes: ``(x / 255 - mean) / std`` by channel, where white is 1.

    Returns:
        float32 of shape ``(B, 3, H, W)``; ``torch.channels_last`` is fastest for convolutions and free here.
    """
    count, height, width, channels = images.shape
    mean_, std_ = torch.tensor(mean), torch.tensor(std)
    # Row by row, because for each element of a dimension as short as the channels' the loop costs more than the sum.
    rows = torch.from_numpy(images.reshape(count, height, width * channels)).to(torch.float32)
    rows.mul_((1 / (255 * std_)).repeat(width)).sub_((mean_ / std_).repeat(width))
    result = rows.view(count, height, width, channels).permute(0, 3, 1, 2)
    return result if channels_last else result.contiguous()


def _crops(images: Pixels, top: npt.NDArray[np.intp], left: npt.NDArray[np.intp], padding: int) -> Pixels:
    """The crop of each bordered image that begins ``top`` pixels down and ``left`` to the right: ``(B, H, 3 W)``."""
    count, height, width, channels = images.shape
    bordered = np.zeros((count, height + 2 * padding, width + 2 * padding, channels), np.uint8)
    bordered[:, padding : padding + height, padding : padding + width] = images
    rows = bordered.reshape(count, height + 2 * padding, (width + 2 * padding) * channels)
    windows = sliding_window_view(rows, (height, width * channels), axis=(1, 2))[:, :, ::channels]
    return windows[np.arange(count), top, left]  # type: ignore[no-any-return]
