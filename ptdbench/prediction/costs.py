"""What a piece of work costs on a device: seconds by shape or bytes, from public tables beside this file.

Rates that ``make gpu-calibrate`` measured on the device itself replace those of the tables, see :class:`Measured`.
Their comments name sources and licences. No figure is fitted to a measured step that a prediction is shown against.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ptdbench.grouping import grouped
from ptdbench.prediction.log import DTYPES, Flag, Kind
from ptdbench.profiling.events import kernel_kind
from ptdbench.virtual.device import Device

#: Seconds that a kernel takes at least.
KERNEL = 2.5e-6

#: Seconds of the host: to begin an operator or a node of autograd, to launch a kernel, to call a message, and to record
#: or wait for an event. An operator that launches a kernel begins several nested ones.
OPERATOR, LAUNCH, CALL, EVENT = 2e-6, 4e-6, 10e-6, 1e-6

#: How much longer work takes beside a message (arXiv 2507.03114: 0.19 in the mean, at most 0.4).
SLOWDOWN = 0.19

#: Families of costs: the parts of a step whose errors are independent, with one standard deviation of each as a share.
#: Those of products and of memory are in the tables; that of fp8 is by how far the tables of :data:`_FP8` differ.
FAMILIES = {"products": None, "fp8 products": 0.1, "attention": 0.1, "convolutions": 0.3, "memory": None}
FAMILIES |= {"messages": 0.15, "bubble": 0.1, "host": 0.5}

#: Shares of bandwidth that products and copies reach, and of a link that messages between two ranks reach.
_STREAMED, _LINK = 0.85, 0.8

#: How much slower a product is that accumulates in, and writes, fp32; and attention with heads of at most 64, a guess.
_WIDE_RESULT, _NARROW_HEADS = 1 / 0.93, 1 / 0.75

#: By how much an fp8 product exceeds half the seconds of one in bf16, beside its depth. AIConfigurator's tables of fp8,
#: less the seconds of quantizing, have 1.13, 1.15, 1.16, 1.23 and 1.26 in the median from 1e11 FLOPs on (5 % apart);
#: their shapes are 16 % apart, and a step has some four.
_FP8 = 1.16

#: The names of dtypes in the peaks of a device.
_PEAKS = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32", "float64": "fp64"}
_PEAKS |= {"float8": "fp8", "float8_e5m2": "fp8"}
_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float8": 1, "float8_e5m2": 1}

#: Operations that move as many bytes over the same links as those that tables have.
_SAME = {"reduce": "reduce_scatter", "broadcast": "all_gather"}


class NoCosts(ValueError):
    """A device or a kind of work without figures."""


@cache
def _table(name: str) -> Sequence[Mapping[str, str]]:
    with Path(__file__).with_name(f"{name}.csv").open(newline="") as file:
        return [*csv.DictReader(line for line in file if not line.startswith("#"))]


@dataclass(frozen=True)
class Measured:
    """What a device reached: a JSON file with its name in ``device``, and ``rows`` of these fields.

    ``kind``, ``name``: ``products`` by dtype, ``attention`` by pass, ``memory`` by family, ``copies`` by direction, or
    ``launches``. ``sizes``: m, n and k in cuBLAS's order, the length, or bytes. ``rate``: FLOP/s, bytes/s, launches/s.
    """

    rates: Mapping[tuple[str, str], Sequence[tuple[Sequence[int], float]]]

    @classmethod
    def read(cls, path: str, device: str) -> Measured:
        """Read a file of ``make gpu-calibrate``; raises NoCosts if it is none, or of another device."""
        try:
            content = json.loads(Path(path).expanduser().read_text())
            rows = [((row["kind"], row["name"]), (row["sizes"], float(row["rate"]))) for row in content["rows"]]
            measured = content["device"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoCosts(f"it is no file of make gpu-calibrate: {error}") from None
        if measured != device:
            raise NoCosts(f"it was measured on {measured}, and this is {device}")
        return cls(grouped(rows))

    def rate(self, kind: str, name: str, *sizes: int) -> float | None:
        """Return the rate for some sizes: of those measured the geometric mean, the nearer the more they count."""
        total = weights = 0.0
        for measured, rate in self.rates.get((kind, name), ()):
            apart = sum(math.log(max(size, 1) / of) ** 2 for size, of in zip(sizes, measured, strict=True))
            weight = 1 / (apart**2 + 1e-12)
            total, weights = total + weight * math.log(rate), weights + weight
        return math.exp(total / weights) if weights else None


@dataclass(frozen=True)
class Costs:
    """The costs of a device."""

    device: Device
    figures: Mapping[str, str]  #: Its row of ``devices.csv``.
    measured: Measured = Measured({})

    @classmethod
    def of(cls, device: Device) -> Costs:
        """Return the costs of a device; raises NoCosts if it has no row, or its ``costs`` cannot be used."""
        measured = Measured.read(device.costs, device.name) if device.costs else Measured({})
        for row in _table("devices"):
            if row["device"] == device.name:
                return cls(device, row, measured)
        have = ", ".join(row["device"] for row in _table("devices"))
        raise NoCosts(f"no costs of {device.name}; there are those of {have}")

    @property
    def error(self) -> float:
        """The error of the level of products, one standard deviation as a share."""
        return float(self.figures["error"])

    @property
    def launch(self) -> float:
        """Seconds of the host to launch a kernel."""
        rate = self.measured.rate("launches", "")
        return 1 / rate if rate else LAUNCH

    def work(self, record: Any, name: str) -> tuple[str, float]:
        """Return the family and the seconds of a kernel, copy or fill; raises NoCosts."""
        size = int(record["bytes"])
        if record["kind"] in (Kind.COPY.value, Kind.SET.value):
            on_device = name not in ("HtoD", "DtoH", "HtoH")
            rate = _STREAMED * self.device.bandwidth / (2 if name == "DtoD" else 1)
            rate = self.measured.rate("copies", name, size) or (rate if on_device else float(self.figures["host"]))
            return "memory", KERNEL + size / rate
        kind = kernel_kind(name)
        if kind == "product" and record["dims"][0] > 0:
            is_fp8 = DTYPES[record["dtype"]].startswith("float8")
            return "fp8 products" if is_fp8 else "products", self._product(record)
        if kind == "attention" and record["dims"][6] > 0:
            return "attention", self._attention(record, is_flash="flash" in name)
        share, _, family = memory_share(name)
        rate = self.measured.rate("memory", family, size) or share * self.device.bandwidth
        if kind == "convolution" and record["dims"][0] > 0:
            return "convolutions", KERNEL + max(self._convolution(record, name), size / rate)
        return "memory", KERNEL + size / rate

    def _product(self, record: Any) -> float:
        """Return the seconds of a product: as many as its FLOPs take, or its bytes."""
        m, n, k, batch = (int(size) for size in record["dims"][:4])
        dtype, result = DTYPES[record["dtype"]], DTYPES[record["result"]]
        name = _PEAKS.get(dtype, "fp32")
        rate = self.measured.rate("products", name, m, n, k) or self._rate(name, k)
        flops = 2.0 * m * n * k * max(batch, 1)
        slower = _WIDE_RESULT if name in ("bf16", "fp16") and result == "float32" else 1.0
        moved = max(batch, 1) * ((m * k + k * n) * _BYTES.get(dtype, 2) + m * n * _BYTES.get(result, 2))
        return KERNEL + max(slower * flops / rate, moved / (_STREAMED * self.device.bandwidth))

    def _convolution(self, record: Any, name: str) -> float:
        """Return the seconds of a convolution's FLOPs, at the rate of the product that it amounts to: a guess."""
        batch, inputs, height, width, outputs, of_group, *taps = (int(size) for size in record["dims"])
        dtype = DTYPES[record["dtype"]]
        weights = outputs * of_group * math.prod(taps)
        results = int(record["bytes"]) // _BYTES.get(dtype, 2) - batch * inputs * height * width - weights
        depth = weights // outputs
        if "dgrad" in name:
            depth = weights // inputs
        elif "wgrad" in name:
            depth = results // outputs
        return 2.0 * results * weights / outputs / self._rate(_PEAKS.get(dtype, "fp32"), depth)

    def _rate(self, name: str, k: int) -> float:
        """Return the FLOP/s of products by the tables; those of fp8 are slower, and twice the depth slows them."""
        if not (peak := self.device.peaks.get(name)):
            raise NoCosts(f"no costs of products in {name} on {self.device.name}")
        slower, deeper = (_FP8, 2) if name == "fp8" else (1.0, 1)
        return float(self.figures["products"]) * peak / slower * k / (k + float(self.figures["depth"]) * deeper)

    def _attention(self, record: Any, is_flash: bool) -> float:
        """Return the seconds of attention, by the share of the peak that its length reaches."""
        batch, heads, queries, width, keys, _, products = (int(size) for size in record["dims"][:7])
        flops = 2.0 * products * batch * heads * queries * keys * width
        flops /= 2 if record["flags"] & Flag.CAUSAL else 1
        slower = _NARROW_HEADS if width <= 64 else 1.0
        of_pass = "forward" if products == 2 else "backward"
        if rate := self.measured.rate("attention", of_pass, keys):
            return KERNEL + slower * flops / rate
        kind, level = self.figures["attention"], float(self.figures["attention_level"])
        if is_flash and kind == "H200":
            kind = "flash"
        rows = [row for row in _table("attention") if row["kind"] == kind]
        lengths = [math.log(int(row["length"])) for row in rows]
        share = level * float(np.interp(math.log(keys), lengths, [float(row[of_pass]) for row in rows]))
        return KERNEL + slower * flops / (share * self.device.peaks["bf16"])

    def message(self, operation: str, ranks: int, size: int) -> float:
        """Return the seconds of a message among ranks of a node, by the bytes of its larger side; raises NoCosts."""
        if not self.device.link:
            raise NoCosts(f"no costs of messages of {self.device.name} without NVLink")
        if operation in ("send", "recv"):
            return 2 * CALL + size / (_LINK * self.device.link)
        of = [
            (int(row["ranks"]), row)
            for row in _table("messages")
            if (row["device"], row["operation"]) == (self.figures["messages"], _SAME.get(operation, operation))
        ]
        if not of or ranks > of[-1][0]:
            raise NoCosts(f"no costs of {operation} of {ranks} ranks on {self.device.name}")
        row = next(row for count, row in of if count >= ranks)
        sizes = [int(name) for name in row if name.isdecimal()]
        seconds = [float(row[str(each)]) * 1e-6 for each in sizes]
        if size > sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        return math.exp(np.interp(math.log(max(size, 1)), np.log(sizes), np.log(seconds)))


@cache
def memory_share(name: str) -> tuple[float, float, str]:
    """Return the share of the bandwidth that a kernel of this name reaches, the error of that share, and its family."""
    kind = kernel_kind(name)
    kinds = {row["kind"] for row in _table("memory")}
    row = next(
        row
        for row in _table("memory")
        if row["kind"] == (kind if kind in kinds else "other") and re.search(row["pattern"], name, re.IGNORECASE)
    )
    return float(row["share"]), float(row["error"]), f"{row['kind']},{row['pattern']}"
