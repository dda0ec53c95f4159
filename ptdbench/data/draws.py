"""Counter-based random numbers: make sample ``k`` a function of the seed and ``k`` alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draws(seed: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Outputs ``start`` to ``stop - 1`` of the SplitMix64 generator that is seeded with ``seed``.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) is a
    hash of a counter, so that any stretch of its stream costs the same and needs nothing before it.

    Args:
        seed: A whole number; taken modulo 2^64.
        start: Number of the first output, counted from zero.
        stop: Number after the last output.

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
