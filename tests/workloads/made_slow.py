"""Checks whose last rank is slow by a factor that no busy machine reaches: ``workload._target_`` names one.

What other processes took of the cores is made up, too.
"""

from collections import namedtuple
from dataclasses import dataclass

import psutil

from ptdbench.job import Job, Outcome
from ptdbench.launch import settings
from ptdbench.measure.results import Matmul
from ptdbench.workloads.check import Check

Times = namedtuple("Times", ["user", "nice", "system", "idle"], defaults=[0.0] * 4)


@dataclass(frozen=True)
class MadeSlow(Check):
    """Measures truly, then divides what the last rank reached; nobody else is there."""

    column = "idle"

    def __call__(self, job: Job) -> Outcome:
        before = psutil.cpu_times
        self._count(0.0)
        try:
            return super().__call__(job)
        finally:
            psutil.cpu_times = before

    def products(self, job: Job) -> Matmul:
        rates = super().products(job)
        for product in rates.ranks[-1].products:
            product.median /= 1e6
        self._count(1e6)  # more than the ranks can have taken
        return rates

    def _count(self, seconds: float) -> None:
        times = [Times(**{self.column: seconds})] * (1 + max(settings.own_cores()))
        psutil.cpu_times = lambda percpu: times


@dataclass(frozen=True)
class MadeBusy(MadeSlow):
    """The same beside other processes."""

    column = "user"


@dataclass(frozen=True)
class MadeWrong(MadeBusy):
    def products(self, job: Job) -> Matmul:
        super().products(job)
        raise ArithmeticError("the fp32 product is wrong")
