"""A GPU model for the virtual library: the figures of its data sheet, and the size of its CUDA context.

The models are in ``conf/virtual/*.yaml``. The figures determine what a program sees
(``torch.cuda.get_device_properties``, what fits); none was measured here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ptdbench.peaks import DENSE_PEAKS
from ptdbench.problems import Problem, at_least, nearest, require, try_these
from ptdbench.units import size_of

if TYPE_CHECKING:
    Size = int
else:  # as typed, before a device is made of it
    Size = int | str

#: The keys that :attr:`Device.peaks` may have.
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")

#: Sizes in bytes, which may have a unit.
_SIZES = ("memory", "allocatable", "context", "l2", "shared_memory")


@dataclass(frozen=True)
class Device:
    """One GPU model."""

    #: Name given by NVIDIA's driver, for example ``NVIDIA H100 80GB HBM3``; the device is called ``virtual NVIDIA H100
    #: 80GB HBM3``, so that its figures are never mistaken for those of a real GPU.
    name: str
    #: Total bytes, as in ``torch.cuda.mem_get_info()[1]``: slightly less than the nominal memory size. A number, or a
    #: text with a unit, such as ``20GiB``; so are the other sizes.
    memory: Size
    context: Size  #: Bytes that the CUDA context takes before the first allocation.
    multiprocessors: int  #: Streaming multiprocessors.
    capability: str | float  #: Compute capability, for example ``"9.0"``.
    bandwidth: float  #: Bytes/s between the device's memory and its processors.
    memory_clock: float  #: Memory clock in Hz.
    bus_width: int  #: Width of the memory bus in bits.
    clock: float  #: Highest clock of the multiprocessors in Hz.
    l2: Size  #: Bytes of the L2 cache.
    shared_memory: Size  #: Maximum bytes of shared memory per thread block.
    #: FLOP/s of dense matrix products by dtype, any of :data:`DTYPES`; other dtypes compute at the rate of fp32. Those
    #: given here replace those on record for the name, see :mod:`ptdbench.peaks`.
    peaks: Mapping[str, float] = field(default_factory=dict)
    #: Bytes/s to other devices of the machine, in one direction; 0: no NVLink, and the rate of PCIe.
    link: float = 0.0
    power: float = 0.0  #: Power limit in W.
    source: str = ""  #: Where the figures are from.
    costs: str = ""  #: A file of ``make gpu-calibrate`` on such a device, for predicted times; empty: public tables.
    #: Bytes that may be allocated, including the context. More than ``memory`` reveals how much a program would need,
    #: although it still sees ``memory``. ``None``: ``memory``.
    allocatable: Size | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "peaks", {**DENSE_PEAKS.get(self.name, {}), **self.peaks})
        for name in _SIZES:
            with suppress(ValueError):  # refused below
                object.__setattr__(self, name, size_of(str(getattr(self, name))))
        whole = ("memory", "context", "multiprocessors", "bus_width", "l2", "shared_memory")
        allocatable = 1 if self.allocatable is None else self.allocatable
        problems = at_least(1, **{name: getattr(self, name) for name in whole}, allocatable=allocatable)
        if not self.name.strip():
            problems.append(Problem("name", self.name, "must be a name"))
        rates = {name: getattr(self, name) for name in ("bandwidth", "memory_clock", "clock")}
        rates |= {f"peaks.{dtype}": rate for dtype, rate in self.peaks.items()}
        wrong = {name: rate for name, rate in rates.items() if not (isinstance(rate, int | float) and rate > 0)}
        problems += [Problem(name, rate, "must be above 0") for name, rate in wrong.items()]
        negative = [name for name in ("link", "power") if getattr(self, name) < 0]
        problems += [Problem(name, getattr(self, name), "must be at least 0") for name in negative]
        if not re.fullmatch(r"\d+\.\d+", str(self.capability)):
            problems.append(Problem("capability", self.capability, "must be two numbers", 'try "9.0"'))
        if self.context >= self.memory >= 1:
            problems.append(Problem("context", self.context, f"must be less than the memory, {self.memory} bytes"))
        for dtype in (dtype for dtype in self.peaks if dtype not in DTYPES):
            remedy = try_these(nearest(dtype, DTYPES) or DTYPES)
            problems.append(Problem(f"peaks.{dtype}", self.peaks[dtype], "no such dtype", remedy))
        require(*problems)

    def settings(self) -> str:
        """Return the device in the format of ``device.c``: ``key=value`` separated by ``;``, the name last."""
        major, minor = str(self.capability).split(".")
        allocatable = self.memory if self.allocatable is None else self.allocatable
        figures = {**vars(self), "allocatable": allocatable, "major": major, "minor": minor, **self.peaks}
        for unread in ("name", "capability", "peaks", "source", "costs"):
            del figures[unread]
        return ";".join([*(f"{key}={value}" for key, value in figures.items()), f"name=virtual {self.name}"])
