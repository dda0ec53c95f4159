"""What the rest of the benchmark asks of a source of samples."""

from __future__ import annotations

from typing import Protocol

import torch


class Data(Protocol):
    """An endless stream of numbered samples that does not depend on who reads which part of it.

    Sample ``k`` is a pure function of the seed and ``k``. A rank asks for the numbers that its place in the
    layout gives it, and so every strategy trains on the same global batch without any communication.

    Constructing one is light: it checks its options, raising a :class:`~ptdbench.problems.ConfigError` with
    all problems and bare option names, and neither reads a corpus nor starts a process.
    """

    @property
    def tokens_per_sample(self) -> int | None:
        """The sequence length, or ``None`` where a sample is not a sequence of tokens."""
        ...

    def prepare(self) -> None:
        """Do the heavy work that is needed once per node, such as building a cache.

        May be called by several processes at once and again later; all but the first find the work done.

        Raises:
            ConfigError: If what the options point at turns out to be unusable.
        """
        ...

    def samples(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of samples ``start`` to ``stop - 1``, contiguous on the CPU, batch first."""
        ...

    def example(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of a batch of one on the meta device: shapes and dtypes without the data."""
        ...
