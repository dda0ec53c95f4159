"""Checks whose last rank is slow by a factor that no busy machine reaches: ``workload._target_`` names one.

What other processes took of the cores is made up, too.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ptdbench.job import Job, Outcome
from ptdbench.launch import settings
from ptdbench.measure import contention
from ptdbench.measure.results import Matmul
from ptdbench.workloads.check import Check


@dataclass(frozen=True)
class MadeSlow(Check):
    """Measures truly, then divides what the last rank reached; nobody else is there."""

    column = 3  # idle

    def __call__(self, job: Job) -> Outcome:
        before = contention.STAT
        with tempfile.TemporaryDirectory() as folder:
            contention.STAT = Path(folder) / "stat"
            self._count(0)
            try:
                return super().__call__(job)
            finally:
                contention.STAT = before

    def products(self, job: Job) -> Matmul:
        rates = super().products(job)
        for product in rates.ranks[-1].products:
            product.median /= 1e6
        self._count(10**6 * os.sysconf("SC_CLK_TCK"))  # more than the ranks can have taken
        return rates

    def _count(self, ticks: int) -> None:
        values = [0] * 8
        values[self.column] = ticks
        lines = [f"cpu{core} {' '.join(map(str, values))}" for core in settings.own_cores()]
        contention.STAT.write_text("\n".join(lines))


@dataclass(frozen=True)
class MadeBusy(MadeSlow):
    """The same beside other processes."""

    column = 0  # user


@dataclass(frozen=True)
class MadeWrong(MadeBusy):
    def products(self, job: Job) -> Matmul:
        super().products(job)
        raise ArithmeticError("the fp32 product is wrong")
