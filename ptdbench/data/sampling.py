"""Sampling by number: counter-based random draws, and a new order of the items in every epoch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draws(seed: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return outputs ``start`` to ``stop - 1`` of the SplitMix64 generator that is seeded with ``seed``, modulo 2^64.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) is a
    hash of a counter, so that any stretch of its stream costs the same and needs nothing before it.

    Returns:
        uint64 of shape ``(stop - start,)``, uniform over all 64 bits.
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


class Epochs:
    """The order in which a stream goes through a data set, over and over.

    Sample ``k`` is number ``k % count`` of epoch ``k // count``, in the order that torch's ``DistributedSampler`` with
    ``shuffle=True`` and the same seed gives a single replica after ``set_epoch(k // count)``. It is asked for one
    replica because here the layout shares each global batch out over the ranks. So nothing is padded or dropped to
    make the ranks' shares equal: every epoch has each item exactly once, and a batch may span two epochs.
    """

    def __init__(self, count: int, seed: int) -> None:
        """Order ``count`` items, at least one, by ``seed``."""
        self._count = count
        self._seed = seed

    def indices(self, start: int, stop: int) -> Indices:
        """Return the items of samples ``start`` to ``stop - 1``: int64, shape ``(stop - start,)``, below ``count``."""
        stretches = [np.empty(0, np.int64)]
        for epoch in range(start // self._count, -(-stop // self._count)):
            first = epoch * self._count
            stretches.append(_order(self._count, self._seed, epoch)[max(start - first, 0) : stop - first])
        return np.concatenate(stretches)


@lru_cache(maxsize=2)  # for access that alternates between two epochs
def _order(count: int, seed: int, epoch: int) -> Indices:
    # The sampler asks for no more than the length, and seeds a generator with seed + epoch, which must be below 2^64.
    items: Any = range(count)
    sampler: DistributedSampler[int] = DistributedSampler(items, num_replicas=1, rank=0, seed=seed % 2**63)
    sampler.set_epoch(epoch)
    return np.fromiter(sampler, np.int64, count)
