"""The workload ``matmul``: rates of matrix products on each rank's device, measured on all ranks at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ptdbench.job import Job, Outcome
from ptdbench.measure import products
from ptdbench.measure.products import DTYPES, ProductShape
from ptdbench.problems import Problem, require, try_these


@dataclass(frozen=True)
class Matmul:
    """Measure the compute ceiling; needs no model and no data."""

    #: One shape of products or a list: ``4096`` for a square one or ``MxNxK``; ``auto``: chosen for the device.
    shapes: int | str | list[int | str] = "auto"
    #: One or a list of ``fp32``, ``tf32``, ``bf16`` and ``fp16``; ``auto``: chosen for the device.
    dtypes: str | list[str] = "auto"
    seconds: float = 0.5  #: Approximate duration of the repetitions of one shape and dtype.

    trains = False

    def __post_init__(self) -> None:
        """Raise ConfigError for options that no device supports."""
        wrong = []
        if self.shapes != "auto":
            try:
                valid = bool([ProductShape.of(shape) for shape in _listed(self.shapes)])
            except ValueError:
                valid = False
            if not valid:
                rule = "must be one or more of N, such as 4096, or MxNxK, such as 4096x1024x512"
                wrong.append(Problem("shapes", self.shapes, rule))
        dtypes = _listed(self.dtypes)
        if self.dtypes != "auto" and (not dtypes or set(map(str, dtypes)) - set(DTYPES)):
            rule = "must be dtypes for matrix products"
            wrong.append(Problem("dtypes", self.dtypes, rule, try_these(DTYPES)))
        if self.seconds <= 0:
            wrong.append(Problem("seconds", self.seconds, "must be greater than 0"))
        require(*wrong)

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for a dtype that the device does not have; ranks check whether matrices fit in memory."""
        _, dtypes = self._chosen(device_type)
        if device_type == "cpu" and "tf32" in dtypes:
            rule = "TF32 exists only on GPUs"
            require(Problem("workload.dtypes", self.dtypes, rule, "try fp32, bf16, fp16"))

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part; ceilings are cached unless earlier ones are higher."""
        shapes, dtypes = self._chosen(job.device.type)
        rates = products.time_products(job.world, job.device, shapes, dtypes, self.seconds, job.watchdog.alive)
        rates.kept = products.keep_ceilings(job.world, rates.ceilings)
        return Outcome(matmul=rates)

    def _chosen(self, device_type: str) -> tuple[list[ProductShape], list[str]]:
        shapes = products.AUTO_SHAPES[device_type] if self.shapes == "auto" else _listed(self.shapes)
        dtypes = products.AUTO_DTYPES[device_type] if self.dtypes == "auto" else _listed(self.dtypes)
        return [ProductShape.of(shape) for shape in shapes], list(dtypes)


def _listed(option: Any) -> list[Any]:
    return list(option) if isinstance(option, Sequence) and not isinstance(option, str) else [option]
