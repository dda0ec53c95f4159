"""Sampling by number: counter-based random draws, a new order of items in every epoch, and image augmentation.

torchvision's transforms draw from one global generator. Here the augmentation of a sample depends only on the seed and
its number, for any layout and after a resume.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import DistributedSampler

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draws(seed: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return outputs ``start`` to ``stop - 1`` of the SplitMix64 generator seeded with ``seed``, modulo 2^64.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) is a hash of a
    counter, so any part of its stream can be computed alone. uint64 of shape ``(stop - start,)``, uniform over all 64
    bits.
    """
    z = np.arange(start + 1, stop + 1, dtype=np.uint64)
    z *= _STEP
    z += np.uint64(seed % 2**64)
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    return z


Indices = npt.NDArray[np.int64]


def shuffled(count: int, seed: int, start: int, stop: int) -> Indices:
    """Return the items of samples ``start`` to ``stop - 1`` of a stream that repeatedly goes through a data set.

    Sample ``k`` is number ``k % count`` of epoch ``k // count``, in the order that torch's ``DistributedSampler`` with
    ``shuffle=True`` and the same seed gives a single replica after ``set_epoch(k // count)``. As the layout splits each
    global batch over the ranks, nothing is padded or dropped: every epoch has each item exactly once, and a batch may
    span two epochs.

    Returns:
        int64 of shape ``(stop - start,)``, below ``count``, which is at least one.
    """
    stretches = [np.empty(0, np.int64)]
    for epoch in range(start // count, -(-stop // count)):
        first = epoch * count
        stretches.append(_order(count, seed, epoch)[max(start - first, 0) : stop - first])
    return np.concatenate(stretches)


@lru_cache(maxsize=2)  # for access that alternates between two epochs
def _order(count: int, seed: int, epoch: int) -> Indices:
    # The sampler only uses the length of the items, and seeds a generator with seed + epoch, which must be below 2^64.
    items: Any = range(count)
    sampler: DistributedSampler[int] = DistributedSampler(items, num_replicas=1, rank=0, seed=seed % 2**63)
    sampler.set_epoch(epoch)
    return np.fromiter(sampler, np.int64, count)


Pixels = npt.NDArray[np.uint8]  # shape (B, H, W, 3)


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
