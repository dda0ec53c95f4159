"""Machines with virtual GPUs, as chosen by ``virtual=``."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptdbench.problems import Problem, require
from ptdbench.terminal import plural
from ptdbench.virtual import library
from ptdbench.virtual.device import Device

#: The most GPUs of a node: torch's C10_COMPILE_TIME_MAX_GPUS.
MOST_GPUS = 120

#: The prefix of the names of virtual GPUs.
_VIRTUAL = "virtual "


def is_virtual(device: str) -> bool:
    """Return whether a GPU is virtual, by the name that torch reports."""
    return device.startswith(_VIRTUAL)


@dataclass(frozen=True)
class Machine:
    """Machines whose GPUs are virtual; all nodes are simulated on this one."""

    gpu: Device  #: The model of the GPUs.
    ranks: Sequence[int] | None = None  #: The ranks of a run to execute; ``None``: all.

    @property
    def gpu_name(self) -> str:
        """Torch's name for the GPUs."""
        return f"{_VIRTUAL}{self.gpu.name}"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPUs."""
        major, minor = str(self.gpu.capability).split(".")  # typed, 7.5 is a number
        return int(major), int(minor)

    def environment(self, count: int) -> dict[str, str]:
        """Return the environment variables for ranks on nodes of ``count`` GPUs; see :func:`library.environment`."""
        variables = library.environment(self.gpu, count, alone=self.ranks is not None)
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}  # replaces that of real GPUs

    def check_ranks(self, size: int) -> None:
        """Refuse ranks that a run of ``size`` does not have; raises ConfigError."""
        if self.ranks is None:
            return
        exist = all(isinstance(rank, int) and 0 <= rank < size for rank in self.ranks)
        if not exist or not self.ranks or len({*self.ranks}) < len(self.ranks):
            rule = f"must be different ranks of the run, which has {plural(size, 'rank')}"
            remedy = f"try numbers from 0 to {size - 1}, or null for all"
            require(Problem("virtual.ranks", list(self.ranks), rule, remedy))


def none() -> None:
    """Choose the real devices."""
