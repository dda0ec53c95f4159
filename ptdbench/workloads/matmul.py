"""The workload ``matmul``: rates of matrix products and copies on each rank's device, measured on all ranks at once.

At once, because ranks of one node share memory, power and cooling, as they do in training.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from ptdbench.job import Job, Outcome
from ptdbench.launch.peers import gather, node
from ptdbench.measure import ceiling, other_load, products, timing
from ptdbench.measure.ceiling import Measured
from ptdbench.measure.hardware import dense_peak, environment
from ptdbench.measure.other_load import OtherLoad
from ptdbench.measure.products import DTYPES, Shape
from ptdbench.problems import Problem, require, try_these
from ptdbench.report import ceilings
from ptdbench.report.text import flops_text
from ptdbench.terminal import command

#: The defaults by device type.
AUTO_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
AUTO_SHAPES = {
    "cpu": ("512", "1024", "2048", "1024x4096x1024"),
    "cuda": ("2048", "4096", "8192", "16384", "8192x28672x8192"),
}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Matmul:
    """Measure the compute ceiling; needs no model and no data.

    Attributes:
        shapes: Shapes of the products: ``4096`` for a square one or ``MxNxK``; ``auto``: chosen for the device.
        dtypes: A list of ``fp32``, ``tf32``, ``bf16`` and ``fp16``; ``auto``: chosen for the device.
        seconds: Approximate duration of the repetitions of one shape and dtype.
    """

    shapes: list[Any] | Literal["auto"] = "auto"
    dtypes: list[str] | Literal["auto"] = "auto"
    seconds: float = 0.5

    trains = False
    show = staticmethod(ceilings.render)

    def __post_init__(self) -> None:
        """Raise ConfigError for options that no device supports."""
        require(*self._wrong_shapes(), *self._wrong_dtypes(), *_not_positive(seconds=self.seconds))

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for a dtype that the device lacks, and for matrices that do not fit its memory."""
        shapes, dtypes = self._chosen(device_type)
        found = []
        if device_type == "cpu" and "tf32" in dtypes:
            rule = "TF32 is a format of GPUs"
            found.append(Problem("workload.dtypes", self._typed(dtypes), rule, "try fp32, bf16, fp16"))
        if device_type == "cpu":  # only a GPU's rank knows its free memory
            found += _too_large(shapes, dtypes, psutil.virtual_memory().total)
        require(*found)

    def __call__(self, job: Job) -> Outcome:
        """One rank's part; the measured ceilings are stored for later runs.

        Raises:
            ArithmeticError: A product is wrong, so that no result of this device can be trusted.
        """
        shapes, dtypes = self._chosen(job.device.type)
        found = measure(job, shapes, dtypes, self.seconds)
        return Outcome({"matmul": {**found, "kept": _keep(job, found)}})

    def _chosen(self, device_type: str) -> tuple[list[Shape], list[str]]:
        shapes = AUTO_SHAPES[device_type] if self.shapes == "auto" else self.shapes
        dtypes = AUTO_DTYPES[device_type] if self.dtypes == "auto" else self.dtypes
        return [Shape.of(shape) for shape in shapes], list(dtypes)

    def _wrong_shapes(self) -> list[Problem]:
        if self.shapes == "auto":
            return []
        rule = "must be numbers such as 4096, or MxNxK such as 4096x1024x512, and at least one"
        try:
            return [] if [Shape.of(shape) for shape in self.shapes] else [Problem("shapes", self.shapes, rule)]
        except ValueError:
            return [Problem("shapes", self._typed(self.shapes), rule)]

    def _wrong_dtypes(self) -> list[Problem]:
        if self.dtypes != "auto" and (not self.dtypes or set(map(str, self.dtypes)) - set(DTYPES)):
            return [Problem("dtypes", self._typed(self.dtypes), "must be dtypes of matrix products", try_these(DTYPES))]
        return []

    @staticmethod
    def _typed(values: Sequence[object]) -> str:
        """A list as typed on the command line."""
        return f"[{','.join(map(str, values))}]"


def measure(job: Job, shapes: Sequence[Shape], dtypes: Sequence[str], seconds: float, copies: bool = True) -> Figures:
    """Time matrix products and memory copies on all ranks at once.

    Args:
        job: This rank's part in the run; every rank calls this.
        shapes: Of the products.
        dtypes: Arithmetic of the products.
        seconds: Approximate duration of the repetitions of each.
        copies: Whether copies are measured too.

    Raises:
        ArithmeticError: A product is wrong.
        ConfigError: The matrices do not fit into memory.

    Returns:
        The same on every rank, rates in FLOP/s and bytes/s: ``ranks`` with the measurements of each rank,
        ``ceilings`` with the best median of every kind of device and dtype, and ``other_load`` with that of each node.
    """
    need, shape = max((_peak_bytes(shape, dtype), str(shape)) for shape in shapes for dtype in dtypes)
    timing.require_memory(job, need, "workload.shapes", shape)
    known = environment(job.device.type)
    load_so_far = other_load.watch(job)
    mine: Figures = {
        "rank": job.world.rank,
        "device": _gpu(job) or known["cpu"],
        "keys": {dtype: asdict(_key(known, job, dtype)) for dtype in dtypes},
        "products": [_product(job, shape, dtype, seconds) for dtype in dtypes for shape in shapes],
        "copies": _copies(job, seconds) if copies else [],
        "node": node(os.environ),
    }
    load, ranks = load_so_far(), gather(mine)
    found = _ceilings(ranks, load)
    return {
        "ranks": [{name: of[name] for name in of if name not in ("keys", "node")} for of in ranks],
        "ceilings": found,
        "other_load": [one.as_dict() for one in load],
    }


def measure_again(job: Job, dtype: str) -> Measured:
    """Measure the ceiling of rank 0's device once more; called in all ranks, the result is the same in all.

    The higher of the earlier and the new measurement is kept for later runs.

    Raises:
        ConfigError: The matrices do not fit into memory beside what is there.
    """
    found = measure(job, [Shape.of(shape) for shape in AUTO_SHAPES[job.device.type]], [dtype], 0.5, copies=False)
    _keep(job, found, only_higher=True)
    return _measured(found["ceilings"][0])


def known_ceiling(job: Job, dtype: str) -> tuple[Measured | None, str | None]:
    """What rank 0's device reached in an earlier run of this workload.

    Returns:
        ``(ceiling, None)``, or ``(None, reason)`` if exactly this device has not been measured.
    """
    of = _key(environment(job.device.type), job, dtype)
    found = ceiling.look_up(of)
    if found is not None:
        return found, None
    words = [f"{command()} workload=matmul"]
    if job.device.type == "cpu":  # the threads of a rank depend on the number of ranks on the node
        words.append(f"cluster.ranks_per_node={job.world.local_size}")
        asked = job.spec.config.cluster.cpus_per_rank
        words += [] if asked == "auto" else [f"cluster.cpus_per_rank={asked}"]
    words += [] if dtype in AUTO_DTYPES[job.device.type] else [f"workload.dtypes=[{dtype}]"]
    return None, f"no ceiling on record for {of}; try {' '.join(words)}"


def _product(job: Job, shape: Shape, dtype: str, seconds: float) -> Figures:
    job.watchdog.alive()
    dist.barrier()  # so that all ranks work at the same time
    taken = products.product_seconds(shape, dtype, job.device, seconds)
    return {"dtype": dtype, "shape": str(shape), **products.rates(shape.flops, taken)}


def _copies(job: Job, seconds: float) -> list[Figures]:
    dist.barrier()
    found = products.copy_seconds(job.device, seconds)
    return [{"kind": kind, "bytes": amount, **products.rates(amount, taken)} for kind, (amount, taken) in found.items()]


def _ceilings(ranks: Sequence[Figures], load: Sequence[OtherLoad]) -> list[Figures]:
    """For every kind of device and dtype: the shape whose median rate is best, as the median over the ranks."""
    loads = {one.node: one for one in load}
    keys = dict.fromkeys(ceiling.Key(**of_dtype) for of in ranks for of_dtype in of["keys"].values())
    found = []
    for key in keys:
        alike = [of for of in ranks if of["keys"].get(key.dtype) == asdict(key)]
        by_shape = {
            product["shape"]: statistics.median(
                one["median"]
                for of in alike
                for one in of["products"]
                if (one["dtype"], one["shape"]) == (key.dtype, product["shape"])
            )
            for product in alike[0]["products"]
            if product["dtype"] == key.dtype
        }
        shape, rate = max(by_shape.items(), key=lambda item: item[1])
        peak, reason = dense_peak(key.device if key.threads is None else "cpu", key.dtype)
        share = None if peak is None else rate / peak
        found.append(
            {
                **asdict(key), "ranks": len(alike), "shape": shape, "flops_per_second": rate,
                "share_of_peak": share, "peak_reason": reason,
                "beside_load": any(loads[of["node"]].slows(of["rank"]) for of in alike),
            }
        )  # fmt: skip
    return found


def _keep(job: Job, found: Figures, only_higher: bool = False) -> str | None:
    """Store the ceilings on every node; returns what could not be stored and why, on rank 0.

    One that was taken beside other load, which makes a device slower, does not replace a higher one.
    """
    if job.world.local_rank > 0:
        return None
    remarks = []
    for one in found["ceilings"]:
        key, new = ceiling.Key(**{name: one[name] for name in ceiling.Key.__dataclass_fields__}), _measured(one)
        known = ceiling.look_up(key)
        if known and known.flops_per_second > new.flops_per_second and (new.beside_load or only_higher):
            higher = f"{flops_text(known.flops_per_second)} measured earlier is higher"
            remarks.append(f"{one['dtype']} not kept for later runs: taken beside other load, and {higher}")
            continue
        try:
            ceiling.keep(key, new)
        except OSError as error:
            return f"not kept for later runs: {error}"
    return "; ".join(remarks) or None


def _measured(found: Figures) -> Measured:
    return Measured(found["flops_per_second"], found["shape"], found["beside_load"])


def _key(known: Figures, job: Job, dtype: str) -> ceiling.Key:
    return ceiling.key(known, _gpu(job), dtype, torch.get_num_threads())


def _gpu(job: Job) -> str | None:
    return torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else None


def _too_large(shapes: Sequence[Shape], dtypes: Sequence[str], memory: int) -> list[Problem]:
    """Problems for products whose matrices do not fit into memory even for one rank."""
    found = []
    for shape in shapes:
        needed = max(_peak_bytes(shape, dtype) for dtype in dtypes)
        if needed > memory:
            rule = f"needs {needed / 2**30:,.0f} GiB for its matrices, and this machine has {memory / 2**30:,.0f} GiB"
            found.append(Problem("workload.shapes", shape, rule, "give a smaller one"))
    return found


def _peak_bytes(shape: Shape, dtype: str) -> int:
    """All three matrices, and one factor in fp32, in which random values are drawn."""
    return shape.bytes(dtype) + 4 * shape.k * max(shape.m, shape.n)


def _not_positive(**options: float) -> list[Problem]:
    return [Problem(name, value, "must be greater than 0") for name, value in options.items() if value <= 0]
