"""Learning rate schedules: a factor of ``optimizer.lr`` that depends only on the step."""

import math
from dataclasses import dataclass
from typing import Protocol

from ptdbench.problems import Problem, at_least, require


class Schedule(Protocol):
    """The type of ``lr_schedule=<name>``."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of step ``step``, counted from zero, of ``steps``."""
        ...


@dataclass(frozen=True)
class Constant:
    """A constant rate after a linear warm-up."""

    warmup_steps: int = 0  #: Steps over which the rate rises; 0: none.

    def __post_init__(self) -> None:
        require(*at_least(0, warmup_steps=self.warmup_steps))

    def factor(self, step: int, steps: int) -> float:
        """See :class:`Schedule`."""
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class Cosine:
    """Half a period of a cosine, from 1 down to ``final``, after a linear warm-up.

    The decay of Loshchilov and Hutter, "SGDR" (2017, equation 5, without restarts), and the warm-up of Goyal et al.,
    "Accurate, Large Minibatch SGD" (2017, section 2.2).
    """

    warmup_steps: int = 0  #: Steps over which the rate rises; 0: none.
    final: float = 0.1  #: The factor of the last step.

    def __post_init__(self) -> None:
        require(*at_least(0, warmup_steps=self.warmup_steps), _share("final", self.final))

    def factor(self, step: int, steps: int) -> float:
        """See :class:`Schedule`."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        return _cosine(1.0, self.final, _progress(step, self.warmup_steps, steps - 1))


@dataclass(frozen=True)
class OneCycle:
    """Rises from ``first`` to 1 and falls to ``final``, both along half a cosine.

    Smith and Topin, "Super-Convergence" (2018), with the default cosine of
    :class:`torch.optim.lr_scheduler.OneCycleLR`. The momentum is constant.
    """

    rise: float = 0.3  #: Fraction of the steps in which the rate rises.
    first: float = 0.04  #: The factor of the first step.
    final: float = 0.0  #: The factor of the last step.

    def __post_init__(self) -> None:
        require(_share("rise", self.rise), _share("first", self.first), _share("final", self.final))

    def factor(self, step: int, steps: int) -> float:
        """See :class:`Schedule`."""
        top = self.rise * (steps - 1)
        if step < top:
            return _cosine(self.first, 1.0, _progress(step, 0, top))
        return _cosine(1.0, self.final, _progress(step, top, steps - 1))


def _warmup(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / steps) if steps else 1.0


def _progress(step: int, begin: float, end: float) -> float:
    """Return the progress of ``step`` from ``begin`` to ``end``, from 0 to 1."""
    return min(max((step - begin) / (end - begin), 0.0), 1.0) if end > begin else 1.0


def _cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2


def _share(option: str, value: float) -> Problem | None:
    return None if 0 <= value <= 1 else Problem(option, value, "must be between 0 and 1")
