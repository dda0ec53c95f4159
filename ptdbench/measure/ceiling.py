"""The compute ceiling of devices: matrix products and copies, timed on all ranks at once and stored for later runs.

All ranks run at once because ranks of one node share memory, power and cooling, as in training.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import asdict

from ptdbench import cache
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import node
from ptdbench.launch.world import World
from ptdbench.measure import contention, products, timing
from ptdbench.measure.hardware import dense_peak, environment
from ptdbench.measure.other_load import OtherLoad
from ptdbench.measure.products import Shape
from ptdbench.terminal import command, plural
from ptdbench.units import flops_text
from ptdbench.virtual.machine import is_virtual

#: The folder of ceilings in the cache.
_KIND = "ceilings"


class Key(Struct, frozen=True):
    """The cache key of a ceiling: everything that it depends on."""

    device: str  #: The GPU's name as reported by torch, or the CPU model.
    driver: str | None  #: Version of the GPU's driver; null on a CPU.
    torch: str  #: Version of PyTorch.
    dtype: str  #: Arithmetic of the products: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    threads: int | None  #: Threads of a rank; null for a GPU, where they do not matter.

    def __str__(self) -> str:
        parts = [self.device, self.driver and f"driver {self.driver}", f"torch {self.torch}", self.dtype]
        if self.threads is not None:
            parts.append(plural(self.threads, "thread"))
        return ", ".join(part for part in parts if part)


def key_of(known: Mapping[str, Any], device: torch.device, dtype: str) -> Key:
    """Return the key of this rank's device; ``known``: its :func:`~ptdbench.measure.hardware.environment`."""
    if device.type == "cuda":
        return Key(torch.cuda.get_device_name(device), known["driver"], known["torch"], dtype, None)
    return Key(known["cpu"], None, known["torch"], dtype, torch.get_num_threads())


class Measured(Struct, frozen=True):
    """A measured ceiling."""

    flops_per_second: float  #: The rate.
    shape: str  #: The product's shape, for readers.
    #: Whether other processes used the device meanwhile, so that the rate may be too low; null if unknown.
    beside_load: bool | None = None


class Ceiling(Key, frozen=True):
    """The best rate of a kind of device, to which later runs are compared."""

    ranks: int  #: Number of ranks that measured it.
    shape: str  #: Shape of the fastest product.
    flops_per_second: float  #: Median rate of that product.
    share_of_peak: float | None  #: That rate divided by the data sheet's dense peak.
    peak_reason: str | None  #: Why there is no peak.
    beside_load: bool  #: Whether other processes used these devices meanwhile, so that the rate may be too low.


def store_ceiling(of: Key, found: Measured) -> Path:
    """Store the latest measurement, atomically; raises OSError."""
    return cache.keep(_KIND, asdict(of), asdict(found))


def look_up(of: Key) -> Measured | None:
    """Return the ceiling measured on exactly this device; ``None`` if there is none, or the file is damaged."""
    with suppress(ValidationError):
        return convert(cache.look_up(_KIND, asdict(of)), Measured)
    return None


#: The defaults by device type.
AUTO_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
AUTO_SHAPES = {
    "cpu": ("512", "1024", "2048", "1024x4096x1024"),
    "cuda": ("2048", "4096", "8192", "16384", "8192x28672x8192"),
}

Figures = dict[str, Any]


def measure(
    world: World,
    device: torch.device,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    seconds: float,
    *,
    copies: bool = True,
    alive: Callable[[], object] = lambda: None,
) -> Figures:
    """Time matrix products, and memory ``copies``, on all ranks at once; every rank calls this.

    Repetitions of each take about ``seconds``. ``alive`` is called between measurements, which together may exceed the
    timeout of the watchdog.

    Returns:
        The field ``matmul`` of a record, as ``docs/record.md`` describes it, the same on every rank.

    Raises:
        ArithmeticError: A product is wrong.
        ConfigError: The matrices do not fit into memory.
    """
    need, shape = max((product_bytes(shape, dtype), str(shape)) for shape in shapes for dtype in dtypes)
    timing.require_memory(device, world.local_size, need, "workload.shapes", shape)
    known = environment(device.type)
    keys = {dtype: key_of(known, device, dtype) for dtype in dtypes}
    load_so_far = contention.watch(device)
    mine: Figures = {
        "rank": world.rank,
        "device": keys[dtypes[0]].device,
        "keys": keys,
        "products": [_product(device, shape, dtype, seconds, alive) for dtype in dtypes for shape in shapes],
        "copies": _copies(device, seconds) if copies else [],
        "node": node(os.environ),
    }
    load, ranks = load_so_far(), gather(mine)
    found = _ceilings(ranks, load)
    return {
        "ranks": [{name: of[name] for name in of if name not in ("keys", "node")} for of in ranks],
        "ceilings": to_builtins(found),
        "other_load": to_builtins(load),
    }


def measure_again(world: World, device: torch.device, dtype: str, alive: Callable[[], object]) -> Measured:
    """Re-measure the ceiling of rank 0's device, stored if higher; called in all ranks, with the same result.

    Raises:
        ConfigError: The matrices do not fit into the free memory.
    """
    shapes = [Shape.of(shape) for shape in AUTO_SHAPES[device.type]]
    found = measure(world, device, shapes, [dtype], 0.5, copies=False, alive=alive)
    keep_ceilings(world, found, only_higher=True)
    return convert(found["ceilings"][0], Measured)


def known_ceiling(
    world: World, device: torch.device, dtype: str, cpus_per_rank: int | str
) -> tuple[Measured | None, str | None]:
    """Return the ceiling of rank 0's device from an earlier run of ``workload=matmul``.

    Returns:
        ``(ceiling, None)``, or ``(None, reason)`` if exactly this device has not been measured; the reason suggests a
        command, with the option ``cpus_per_rank``.
    """
    of = key_of(environment(device.type), device, dtype)
    found = look_up(of)
    if found is not None:
        return found, None
    words = [f"{command()} workload=matmul"]
    if device.type == "cpu":  # the threads of a rank depend on the number of ranks on the node
        words.append(f"cluster.ranks_per_node={world.local_size}")
        words += [] if cpus_per_rank == "auto" else [f"cluster.cpus_per_rank={cpus_per_rank}"]
    words += [] if dtype in AUTO_DTYPES[device.type] else [f"workload.dtypes=[{dtype}]"]
    return None, f"no ceiling on record for {of}; try {' '.join(words)}"


def _product(device: torch.device, shape: Shape, dtype: str, seconds: float, alive: Callable[[], object]) -> Figures:
    alive()
    dist.barrier()  # so that all ranks work at the same time
    taken = products.product_seconds(shape, dtype, device, seconds)
    return {"dtype": dtype, "shape": str(shape), **products.rates(shape.flops, taken)}


def _copies(device: torch.device, seconds: float) -> list[Figures]:
    dist.barrier()
    found = products.copy_seconds(device, seconds)
    return [{"kind": kind, "bytes": amount, **products.rates(amount, taken)} for kind, (amount, taken) in found.items()]


def _ceilings(ranks: Sequence[Figures], load: Sequence[OtherLoad]) -> list[Ceiling]:
    """Find for each kind of device and dtype the shape with the best median rate, using the median over ranks."""
    loads = {one.node: one for one in load}
    found = []
    for key in dict.fromkeys(key for of in ranks for key in of["keys"].values()):
        alike = [of for of in ranks if of["keys"].get(key.dtype) == key]
        rates: defaultdict[str, list[float]] = defaultdict(list)
        for product in (product for of in alike for product in of["products"] if product["dtype"] == key.dtype):
            rates[product["shape"]].append(product["median"])
        medians = {shape: statistics.median(of_ranks) for shape, of_ranks in rates.items()}
        shape = max(medians, key=medians.__getitem__)
        rate = medians[shape]
        peak, reason = dense_peak(key.device if key.threads is None else "cpu", key.dtype)
        found.append(
            Ceiling(
                **asdict(key),
                ranks=len(alike),
                shape=shape,
                flops_per_second=rate,
                share_of_peak=None if peak is None else rate / peak,
                peak_reason=reason,
                beside_load=any(loads[of["node"]].slows(of["rank"]) for of in alike),
            )
        )
    return found


def keep_ceilings(world: World, found: Figures, only_higher: bool = False) -> str | None:
    """Store the ceilings on every node; return what could not be stored and why, on rank 0.

    A ceiling measured beside other load, which makes a device slower, does not replace a higher one; with
    ``only_higher``, none does.
    """
    if world.local_rank > 0:
        return None
    if any(is_virtual(one["device"]) for one in found["ceilings"]):
        return "not kept for later runs: virtual GPUs compute nothing"
    remarks = []
    for one in found["ceilings"]:
        key, new = convert(one, Key), convert(one, Measured)
        known = look_up(key)
        if known and known.flops_per_second > new.flops_per_second and (new.beside_load or only_higher):
            load = "taken beside other load, and " if new.beside_load else ""
            higher = f"{flops_text(known.flops_per_second)} measured earlier is higher"
            remarks.append(f"{one['dtype']} not kept for later runs: {load}{higher}")
            continue
        try:
            store_ceiling(key, new)
        except OSError as error:
            return f"not kept for later runs: {error}"
    return "; ".join(remarks) or None


def product_bytes(shape: Shape, dtype: str) -> int:
    """Return the bytes of all three matrices, plus one factor in fp32, in which random values are drawn."""
    return shape.bytes(dtype) + 4 * shape.k * max(shape.m, shape.n)
