"""What the rest of the benchmark asks of a source of samples."""

from __future__ import annotations

from typing import Protocol

import torch


class HeldOut(Protocol):
    """Samples that are kept from training, finite and in a fixed order: what a model is evaluated on."""

    #: Bytes of text that one target stands for, on average; ``None`` where samples are no text.
    bytes_per_token: float | None = None

    def __len__(self) -> int:
        """How many there are."""
        ...

    def samples(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of samples ``start`` to ``stop - 1``, on the CPU, batch first; always the same."""
        ...


class Data(Protocol):
    """An endless stream of numbered samples that does not depend on who reads which part of it.

    Sample ``k`` is a pure function of the seed and ``k``. A rank asks for the numbers that its place in the
    layout gives it, and so every strategy trains on the same global batch without any communication.

    Constructing one is light: it checks its options, raising a :class:`~ptdbench.problems.ConfigError` with
    all problems and bare option names, and neither reads a corpus nor starts a process.
    """

    #: Processes that make the samples, beside each rank; 0 where the rank itself makes them fast enough.
    workers: int = 0

    @property
    def tokens_per_sample(self) -> int | None:
        """The sequence length, or ``None`` where a sample is not a sequence of tokens."""
        ...

    @property
    def held_out(self) -> HeldOut | None:
        """What is kept from training, known once it is prepared; ``None`` where there is none."""
        return None

    @property
    def identity(self) -> str | None:
        """A digest that changes when the data do, known once they are prepared; ``None`` where nothing can change."""
        return None

    def prepare(self) -> None:
        """Do the heavy work that is needed once per node, such as building a cache.

        May be called by several processes at once and again later; all but the first find the work done.

        Raises:
            ptdbench.problems.ConfigError: If what the options point at turns out to be unusable.
        """
        ...

    def samples(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of samples ``start`` to ``stop - 1``, on the CPU, batch first."""
        ...

    def example(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of a batch of one on the meta device: shapes and dtypes without the data."""
        ...
