"""Matrix products: their rates on one device with a cold cache, and on all ranks at once, cached as its ceiling.

All ranks run at once because ranks of a node share memory, power and cooling in training too.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import ValidationError, convert
from msgspec.structs import asdict
from torch import Tensor

from ptdbench.files import from_cache, to_cache
from ptdbench.grouping import grouped
from ptdbench.launch.collect import gather
from ptdbench.launch.world import World
from ptdbench.measure import hardware, timing
from ptdbench.measure.memory import no_collection
from ptdbench.measure.results import Ceiling, Key, Matmul, Product, RankProducts
from ptdbench.measure.timing import Effort, Step, timed
from ptdbench.peaks import dense_peak
from ptdbench.units import flops_text
from ptdbench.virtual.machine import is_virtual

#: Arithmetic of a product → dtype of its matrices. ``tf32``: fp32 matrices with TF32 allowed.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Maximum error of a product relative to its largest entry: of rounding inputs and output, with a margin for sums.
TOLERANCE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}

#: The defaults by device type.
AUTO_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
AUTO_SHAPES = {
    "cpu": ("512", "1024", "2048", "1024x4096x1024"),
    "cuda": ("2048", "4096", "8192", "16384", "8192x28672x8192"),
}

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


class _OfRank(NamedTuple):
    rates: RankProducts
    keys: Mapping[str, Key]  #: Of its device, by dtype.


def time_products(
    world: World,
    device: torch.device,
    shapes: Sequence[ProductShape],
    dtypes: Sequence[str],
    seconds: float,
    alive: Callable[[], object] = lambda: None,
) -> Matmul:
    """Time matrix products on all ranks at once; called in all ranks, with the same result.

    Repetitions of each take about ``seconds``. ``alive``: called between measurements, for the watchdog.

    Raises:
        ArithmeticError: A product is wrong.
        ConfigError: The matrices do not fit into memory.
    """
    need, largest = max(  # random values are drawn in fp32, one factor at a time
        (shape.bytes(dtype) + 4 * shape.k * max(shape.m, shape.n), str(shape)) for shape in shapes for dtype in dtypes
    )
    timing.require_memory(device, world.local_size, need, "workload.shapes", largest)
    installed = hardware.environment(device.type)
    keys = {dtype: ceiling_key(installed, device, dtype) for dtype in dtypes}
    rates = RankProducts(
        rank=world.rank,
        device=keys[dtypes[0]].device,
        products=[_product(device, shape, dtype, seconds, alive) for dtype in dtypes for shape in shapes],
    )
    ranks = gather(_OfRank(rates, keys))
    return Matmul([of_rank.rates for of_rank in ranks], _ceilings(ranks))


def _product(
    device: torch.device, shape: ProductShape, dtype: str, seconds: float, alive: Callable[[], object]
) -> Product:
    alive()
    dist.barrier()  # so that all ranks work at the same time
    taken = product_seconds(shape, dtype, device, seconds)
    return Product(dtype, str(shape), *rates(shape.flops, taken))


def _ceilings(ranks: Sequence[_OfRank]) -> list[Ceiling]:
    """Return the best rate over shapes for each kind of device and dtype, by the median over its ranks."""
    ceilings = []
    for key in dict.fromkeys(key for of_rank in ranks for key in of_rank.keys.values()):
        alike = [of_rank for of_rank in ranks if of_rank.keys.get(key.dtype) == key]
        measured = (product for of_rank in alike for product in of_rank.rates.products if product.dtype == key.dtype)
        rates = grouped((product.shape, product.median) for product in measured)
        rate, shape = max((statistics.median(of_ranks), shape) for shape, of_ranks in rates.items())
        peak, reason = dense_peak(key.device if key.threads is None else "cpu", key.dtype)
        ceilings.append(
            Ceiling(
                **asdict(key),
                ranks=len(alike),
                shape=shape,
                flops_per_second=rate,
                share_of_peak=None if peak is None else rate / peak,
                peak_reason=reason,
            )
        )
    return ceilings


#: The folder of ceilings in the cache.
_CEILINGS = "ceilings"


def ceiling_key(installed: Mapping[str, Any], device: torch.device, dtype: str) -> Key:
    """Return the key of this rank's device; ``installed``: its :func:`~ptdbench.measure.hardware.environment`."""
    if device.type == "cuda":
        return Key(torch.cuda.get_device_name(device), installed["driver"], installed["torch"], dtype, None)
    return Key(installed["cpu"], None, installed["torch"], dtype, torch.get_num_threads())


def store_ceiling(ceiling: Ceiling) -> Path:
    """Store the latest measurement, atomically; raise OSError if that fails."""
    return to_cache(_CEILINGS, asdict(convert(ceiling, Key, from_attributes=True)), asdict(ceiling))


def stored_ceiling(key: Key) -> Ceiling | None:
    """Return the ceiling measured on exactly this device; ``None`` if there is none, or the file is damaged."""
    with suppress(ValidationError):
        return convert(from_cache(_CEILINGS, asdict(key)), Ceiling)
    return None


def keep_ceilings(world: World, ceilings: Sequence[Ceiling]) -> str | None:
    """Cache the ceilings on every node, except below an earlier one: anything that interferes lowers a rate.

    Return what was not cached and why, on rank 0.
    """
    if world.local_rank > 0:
        return None
    if any(is_virtual(ceiling.device) for ceiling in ceilings):
        return "not cached: virtual GPUs compute nothing"
    remarks = []
    for ceiling in ceilings:
        earlier = stored_ceiling(convert(ceiling, Key, from_attributes=True))
        if earlier and earlier.flops_per_second > ceiling.flops_per_second:
            higher = f"the earlier {flops_text(earlier.flops_per_second)} is higher"
            remarks.append(f"{ceiling.dtype} not cached: {higher}")
            continue
        try:
            store_ceiling(ceiling)
        except OSError as error:
            return f"not cached: {error}"
    return "; ".join(remarks) or None
