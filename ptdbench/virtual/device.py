"""A model of GPU as the virtual library imitates it: the figures of its data sheet, and its context.

``conf/virtual/*.yaml`` has the models. The figures decide what a program sees (``torch.cuda.get_device_properties``,
what fits) and, crudely, how long the device takes in real-time mode; none of them was measured here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ptdbench.problems import Problem, at_least, nearest, require, try_these

#: What :attr:`Device.peaks` may name.
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Device:
    """One model of GPU."""

    #: As NVIDIA's driver names it, for example ``NVIDIA H100 80GB HBM3``; the device is called ``virtual NVIDIA H100
    #: 80GB HBM3``, so that nothing takes its figures for those of a real one.
    name: str
    #: Bytes in all, as ``torch.cuda.mem_get_info()[1]`` has them: somewhat less than the memory is sold as.
    memory: int
    context: int  #: Bytes of it that the CUDA context takes before the first allocation.
    multiprocessors: int  #: Streaming multiprocessors.
    capability: str  #: Compute capability, for example ``"9.0"``.
    bandwidth: float  #: Bytes/s between the device's memory and its processors.
    memory_clock: float  #: Clock of its memory in Hz.
    bus_width: int  #: Width of its memory's bus in bits.
    clock: float  #: Highest clock of its multiprocessors in Hz.
    l2: int  #: Bytes of its second-level cache.
    shared_memory: int  #: Bytes of shared memory that a thread block may ask for.
    #: FLOP/s of dense matrix products by dtype, any of :data:`DTYPES`; a dtype without one computes at the rate of
    #: fp32.
    peaks: Mapping[str, float] = field(default_factory=dict)
    #: Bytes/s that it sends to other devices of its machine, in one direction; 0 without NVLink, which then is PCIe's.
    link: float = 0.0
    power: float = 0.0  #: Power limit in W.
    #: Bytes that may be taken of it, its context included; more than it has show what a program would need, which
    #: decides by ``memory`` all the same. ``None``: ``memory``.
    allocatable: int | None = None

    def __post_init__(self) -> None:
        whole = ("memory", "context", "multiprocessors", "bus_width", "l2", "shared_memory")
        above = ("bandwidth", "memory_clock", "clock")
        allocatable = 1 if self.allocatable is None else self.allocatable
        require(
            *at_least(1, **{name: getattr(self, name) for name in whole}, allocatable=allocatable),
            *(Problem(name, getattr(self, name), "must be above 0") for name in above if not getattr(self, name) > 0),
            None
            if re.fullmatch(r"\d+\.\d+", str(self.capability))
            else Problem("capability", self.capability, "must be two numbers", 'try "9.0"'),
            None
            if self.context < self.memory
            else Problem("context", self.context, f"must be less than the memory, {self.memory} bytes"),
            *(
                Problem(f"peaks.{name}", rate, "no such dtype", try_these(nearest(name, DTYPES) or DTYPES))
                for name, rate in self.peaks.items()
                if name not in DTYPES
            ),
        )

    def settings(self) -> str:
        """The device as ``device.c`` reads it: ``key=value`` separated by ``;``, the name last."""
        major, minor = str(self.capability).split(".")
        figures = {
            **{name: value for name, value in vars(self).items() if name not in ("name", "capability", "peaks")},
            "allocatable": self.memory if self.allocatable is None else self.allocatable,
            "major": major,
            "minor": minor,
            **self.peaks,
        }
        return ";".join([*(f"{key}={value}" for key, value in figures.items()), f"name=virtual {self.name}"])
