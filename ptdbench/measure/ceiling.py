"""The compute ceiling of devices: matrix products, timed on all ranks and cached for later runs.

All ranks run at once, as ranks of a node share memory, power and cooling in training too.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import ValidationError, convert
from msgspec.structs import asdict

from ptdbench.files import from_cache, to_cache
from ptdbench.grouping import grouped
from ptdbench.launch.collect import gather
from ptdbench.launch.world import World
from ptdbench.measure import products, timing
from ptdbench.measure.hardware import environment
from ptdbench.measure.products import ProductShape
from ptdbench.measure.results import Ceiling, Key, Matmul, Product, RankProducts
from ptdbench.peaks import dense_peak
from ptdbench.units import flops_text
from ptdbench.virtual.machine import is_virtual

#: The folder of ceilings in the cache.
_KIND = "ceilings"


def key_of(installed: Mapping[str, Any], device: torch.device, dtype: str) -> Key:
    """Return the key of this rank's device; ``installed``: its :func:`~ptdbench.measure.hardware.environment`."""
    if device.type == "cuda":
        return Key(torch.cuda.get_device_name(device), installed["driver"], installed["torch"], dtype, None)
    return Key(installed["cpu"], None, installed["torch"], dtype, torch.get_num_threads())


def store_ceiling(ceiling: Ceiling) -> Path:
    """Store the latest measurement, atomically; raise OSError if that fails."""
    return to_cache(_KIND, asdict(convert(ceiling, Key, from_attributes=True)), asdict(ceiling))


def look_up(key: Key) -> Ceiling | None:
    """Return the ceiling measured on exactly this device; ``None`` if there is none, or the file is damaged."""
    with suppress(ValidationError):
        return convert(from_cache(_KIND, asdict(key)), Ceiling)
    return None


#: The defaults by device type.
AUTO_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
AUTO_SHAPES = {
    "cpu": ("512", "1024", "2048", "1024x4096x1024"),
    "cuda": ("2048", "4096", "8192", "16384", "8192x28672x8192"),
}


class _OfRank(NamedTuple):
    """What one rank measured."""

    rates: RankProducts
    keys: Mapping[str, Key]  #: Of its device, by dtype.


def measure(
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
    installed = environment(device.type)
    keys = {dtype: key_of(installed, device, dtype) for dtype in dtypes}
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
    taken = products.product_seconds(shape, dtype, device, seconds)
    return Product(dtype, str(shape), *products.rates(shape.flops, taken))


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
        earlier = look_up(convert(ceiling, Key, from_attributes=True))
        if earlier and earlier.flops_per_second > ceiling.flops_per_second:
            higher = f"the earlier {flops_text(earlier.flops_per_second)} is higher"
            remarks.append(f"{ceiling.dtype} not cached: {higher}")
            continue
        try:
            store_ceiling(ceiling)
        except OSError as error:
            return f"not cached: {error}"
    return "; ".join(remarks) or None
