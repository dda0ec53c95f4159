"""Measured matrix product rates of devices, stored in the user's cache folder for later runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptdbench import cache
from ptdbench.terminal import plural

#: The folder of ceilings in the cache.
_KIND = "ceilings"


@dataclass(frozen=True)
class Key:
    """Everything that a ceiling depends on.

    Attributes:
        device: The GPU's name as torch reports it, or the CPU's model.
        driver: Version of the GPU's driver; ``None`` for a CPU.
        torch: Version of torch.
        dtype: Arithmetic of the products: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        threads: Threads of a rank; ``None`` for a GPU, where they do not matter.
    """

    device: str
    driver: str | None
    torch: str
    dtype: str
    threads: int | None

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


@dataclass(frozen=True)
class Measured:
    """A measured ceiling.

    Attributes:
        flops_per_second: The rate.
        shape: The product's shape, for readers.
        beside_load: Whether other processes used the device meanwhile, so that it may be too low; ``None`` if unknown.
    """

    flops_per_second: float
    shape: str
    beside_load: bool | None = None


def keep(of: Key, found: Measured) -> Path:
    """Store the latest measurement, atomically.

    Args:
        of: The key of the device.
        found: The measurement.

    Raises:
        OSError: It cannot be written.
    """
    return cache.keep(_KIND, asdict(of), asdict(found))


def look_up(of: Key) -> Measured | None:
    """What was measured on exactly this device; ``None`` if nothing was, or the file is damaged."""
    found = cache.look_up(_KIND, asdict(of))
    if not isinstance(found.get("flops_per_second"), float):
        return None
    return Measured(found["flops_per_second"], str(found.get("shape")), found.get("beside_load"))
