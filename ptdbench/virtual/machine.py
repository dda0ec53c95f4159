"""Machines with virtual GPUs: what ``virtual=`` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptdbench.problems import Problem, require
from ptdbench.terminal import plural
from ptdbench.virtual import library
from ptdbench.virtual.device import Device

#: How the names of virtual GPUs begin.
_VIRTUAL = "virtual "


def is_virtual(device: str) -> bool:
    """Return whether a GPU is virtual, by the name that torch reports."""
    return device.startswith(_VIRTUAL)


@dataclass(frozen=True)
class Machine:
    """Machines whose GPUs are virtual; all of them are this one."""

    gpu: Device  #: The model of the GPUs.
    ranks: Sequence[int] | None = None  #: The ranks of a run that are carried out; ``None`` for all.
    real_time: bool = False  #: Whether the GPUs take their time.

    @property
    def gpu_name(self) -> str:
        """Torch's name for the GPUs."""
        return f"{_VIRTUAL}{self.gpu.name}"

    @property
    def capability(self) -> tuple[int, int]:
        """Their compute capability."""
        major, minor = self.gpu.capability.split(".")
        return int(major), int(minor)

    def environment(self, count: int) -> dict[str, str]:
        """Variables that ranks have to be started with; builds the library at its first use.

        Args:
            count: GPUs of a node.

        Raises:
            ConfigError: There is nothing to build it with, or nothing that it could serve.
        """
        variables = library.environment(self.gpu, count, alone=self.ranks is not None, real_time=self.real_time)
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}  # not those of real GPUs

    def check_ranks(self, size: int) -> None:
        """Refuse ranks that a run of ``size`` does not have; raises ConfigError."""
        if self.ranks is None:
            return
        wrong = [rank for rank in self.ranks if not (isinstance(rank, int) and 0 <= rank < size)]
        if wrong or not self.ranks or len({*self.ranks}) < len(self.ranks):
            rule = f"must be different ranks of the run, which has {plural(size, 'rank')}"
            remedy = f"try numbers from 0 to {size - 1}, or null for all"
            require(Problem("virtual.ranks", list(self.ranks), rule, remedy))


def none() -> None:
    """The devices that are there."""
