"""What a device has reached in a matrix product, kept for the runs that come after, in the user's cache folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ptdbench.cache import user_cache
from ptdbench.terminal import plural


@dataclass(frozen=True)
class Key:
    """Everything that a ceiling depends on; where anything differs it is another ceiling.

    Attributes:
        device: The GPU's name as torch reports it, or the CPU's model.
        driver: Version of the GPU's driver; ``None`` for a CPU.
        torch: Version of torch.
        dtype: What the products run in: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        threads: Threads of a rank; ``None`` for a GPU, to which they do not matter.
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
        environment: As :func:`ptdbench.measure.hardware.environment` gives it.
        gpu: The GPU's name as torch reports it; ``None`` for the CPU.
        dtype: What the products run in.
        threads: Threads of a rank.
    """
    if gpu:
        return Key(gpu, environment["driver"], environment["torch"], dtype, None)
    return Key(environment["cpu"], None, environment["torch"], dtype, threads)


def keep(of: Key, flops_per_second: float, shape: str) -> Path:
    """Keep what was measured last, in a file that appears complete or not at all.

    Args:
        of: What it was measured on.
        flops_per_second: What was reached.
        shape: The product's shape, for people.

    Raises:
        OSError: It cannot be written.
    """
    path = _path(of)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # ranks of several hosts may write
    try:
        partial.write_text(json.dumps({**asdict(of), "flops_per_second": flops_per_second, "shape": shape}, indent=1))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def look_up(of: Key) -> float | None:
    """FLOP/s that were reached on exactly this device; ``None`` where nobody has measured it, or the file is broken."""
    with suppress(OSError, ValueError):
        found = json.loads(_path(of).read_text())
        if isinstance(found, dict) and isinstance(found.get("flops_per_second"), float):
            return found["flops_per_second"]
    return None


def _path(of: Key) -> Path:
    identity = json.dumps(asdict(of), sort_keys=True)
    return user_cache() / "ceilings" / f"{sha256(identity.encode()).hexdigest()[:16]}.json"
