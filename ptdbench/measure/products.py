"""Rates of matrix products on one device, with a cold cache."""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ptdbench.measure import hardware
from ptdbench.measure.memory import no_collection
from ptdbench.measure.timing import Effort, Step, timed

#: Arithmetic of a product → dtype of its matrices. ``tf32``: fp32 matrices with TF32 allowed.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Maximum error of a product relative to its largest entry: of rounding inputs and output, with a margin for sums.
TOLERANCE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ProductShape:
    """A product of an ``(m, k)`` and a ``(k, n)`` matrix."""

    m: int
    n: int
    k: int

    @classmethod
    def of(cls, text: object) -> ProductShape:
        """Parse ``4096`` for a square product or ``MxNxK``, such as ``4096x1024x512``; raises ValueError."""
        if not re.fullmatch(r"\d+(x\d+x\d+)?", str(text)) or "0" in str(text).split("x"):
            raise ValueError(f"{text} is not a shape")
        sides = [int(side) for side in str(text).split("x")]
        return cls(*(sides if len(sides) == 3 else sides * 3))

    @property
    def flops(self) -> int:
        """Number of multiplications and additions of one product."""
        return 2 * self.m * self.n * self.k

    def bytes(self, dtype: str) -> int:
        """Return the memory of the three matrices."""
        return DTYPES[dtype].itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def cache_flusher(device: torch.device) -> Callable[[], Tensor]:
    """Return a function that flushes the last-level cache, in the stream, by updating a buffer of twice its size."""
    buffer = torch.zeros(2 * cache_bytes(device) // 4, device=device)
    return partial(buffer.add_, 1)  # reads too: pure writes may bypass the cache


def product_seconds(shape: ProductShape, dtype: str, device: torch.device, seconds: float) -> list[float]:
    """Return the seconds of each timed product of two random matrices, in about ``seconds``, flushes included.

    With zeros a GPU draws less power and clocks higher than in real use. The cache is flushed before each product.
    Raise ArithmeticError if the product is wrong.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(rows, columns, generator=generator, device=device).to(DTYPES[dtype])
        for rows, columns in ((shape.m, shape.k), (shape.k, shape.n))
    )
    out = torch.empty(shape.m, shape.n, dtype=DTYPES[dtype], device=device)
    with hardware.tf32_allowed(dtype == "tf32"):
        taken = repeat(lambda: torch.mm(a, b, out=out), cache_flusher(device), device, seconds)
    _verify(a, b, out, dtype, shape)
    return taken


def repeat(work: Step, between: Step, device: torch.device, seconds: float) -> list[float]:
    """Return the seconds of each timed repetition of ``work``; ``between`` runs untimed before each of them.

    All repetitions take about ``seconds``, within the bounds of an :class:`Effort`, whose warm-up lets the library
    choose its kernel.
    """
    effort = Effort(seconds, max_seconds=math.inf)
    gc.collect()
    with no_collection():
        timed(work, effort.warmup, device, between)
        started = time.perf_counter()
        timed(work, 1, device, between)
        once = time.perf_counter() - started
        return timed(work, effort.repetitions(once), device, between)


def rates(amount: float, seconds: Sequence[float]) -> tuple[int, float, float, float]:
    """Return the number of repetitions that each do ``amount``, and their rates: total over total, median and best."""
    mean = amount * len(seconds) / sum(seconds)
    return len(seconds), mean, amount / statistics.median(seconds), amount / min(seconds)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [1024 * int(path.read_text().strip().removesuffix("K")) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=_USUAL_CACHE_BYTES)


def _verify(a: Tensor, b: Tensor, out: Tensor, dtype: str, shape: ProductShape) -> None:
    """Compare a corner of the product with double precision."""
    corner = a[:8].double() @ b[:, :8].double()
    error = ((out[:8, :8].double() - corner).abs().max() / corner.abs().max()).item()
    if not error <= TOLERANCE[dtype]:  # true for NaN, too
        raise ArithmeticError(
            f"the {dtype} product {shape} on {a.device} has a relative error of {error:.1e}, "
            f"but rounding explains at most {TOLERANCE[dtype]:.0e}"
        )
