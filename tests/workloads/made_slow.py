"""A check whose last rank is slow by a factor that no busy machine reaches: ``workload._target_`` names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptdbench.job import Job
from ptdbench.workloads.check import Check


@dataclass(frozen=True)
class MadeSlow(Check):
    """Measures truly, then divides what the last rank reached."""

    def products(self, job: Job) -> dict[str, Any]:
        found = super().products(job)
        for product in found["ranks"][-1]["products"]:
            product["median"] /= 1e6
        return found
