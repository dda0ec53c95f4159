"""Measured matrix product rates of devices, stored in the user's cache folder for later runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

from ptdbench import cache
from ptdbench.terminal import plural

#: The folder of ceilings in the cache.
_KIND = "ceilings"


class Key(Struct, frozen=True):
    """Everything that a ceiling depends on."""

    device: str
    """The GPU's name as torch reports it, or the CPU's model."""
    driver: str | None
    """Version of its driver; null on a CPU."""
    torch: str
    """Version of PyTorch."""
    dtype: str
    """Arithmetic of the products: ``fp32``, ``tf32``, ``bf16`` or ``fp16``."""
    threads: int | None
    """Threads of a rank; null for a GPU, where they do not matter."""

    def __str__(self) -> str:
        parts = [self.device, self.driver and f"driver {self.driver}", f"torch {self.torch}", self.dtype]
        if self.threads is not None:
            parts.append(plural(self.threads, "thread"))
        return ", ".join(part for part in parts if part)


def key(environment: Mapping[str, Any], gpu: str | None, dtype: str, threads: int) -> Key:
    """The key of a device.

    Args:
        environment: The result of :func:`ptdbench.measure.hardware.environment`.
        gpu: The GPU's name as torch reports it; ``None`` for the CPU.
        dtype: Arithmetic of the products.
        threads: Threads of a rank.
    """
    if gpu:
        return Key(gpu, environment["driver"], environment["torch"], dtype, None)
    return Key(environment["cpu"], None, environment["torch"], dtype, threads)


class Measured(Struct, frozen=True):
    """A measured ceiling."""

    flops_per_second: float
    """The rate."""
    shape: str
    """The product's shape, for readers."""
    beside_load: bool | None = None
    """Whether other processes used the device meanwhile, so that it may be too low; null if unknown."""


class Ceiling(Key, frozen=True):
    """The best rate of a kind of device, to which later runs are compared."""

    ranks: int
    """Ranks that measured it."""
    shape: str
    """The fastest product."""
    flops_per_second: float
    """Its median rate."""
    share_of_peak: float | None
    """That rate over the data sheet's dense peak."""
    peak_reason: str | None
    """Why there is no peak."""
    beside_load: bool
    """Whether other processes used these devices meanwhile, so that it may be too low."""


def keep(of: Key, found: Measured) -> Path:
    """Store the latest measurement, atomically.

    Raises:
        OSError: It cannot be written.
    """
    return cache.keep(_KIND, asdict(of), asdict(found))


def look_up(of: Key) -> Measured | None:
    """What was measured on exactly this device; ``None`` if nothing was, or the file is damaged."""
    with suppress(ValidationError):
        return convert(cache.look_up(_KIND, asdict(of)), Measured)
    return None
