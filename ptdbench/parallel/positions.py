"""Which positions of a sequence each rank of a group has, under context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """The positions of a sequence in equal pieces, and those of one rank.

    Attributes:
        ranks: How many share a sequence.
        rank: This one.
        paired: Whether each has two pieces, one from each end: ``[0, 7]``, ``[1, 6]``, ... Under a causal mask all have
            the same number of pairs of positions then. Else each has one piece.
    """

    ranks: int
    rank: int
    paired: bool

    @property
    def pieces(self) -> int:
        """Pieces of a sequence."""
        return self.ranks * (1 + self.paired)

    def own(self, tensor: Tensor, dimension: int) -> Tensor:
        """This rank's share of a whole sequence, whose length is a multiple of :attr:`pieces`."""
        assert tensor.shape[dimension] % self.pieces == 0  # refused before
        pieces = tensor.tensor_split(self.pieces, dimension)
        return torch.cat([pieces[number] for number in self._of(self.rank)], dimension)

    def numbers(self, local: Tensor) -> Tensor:
        """The positions in the whole sequence of those in this rank's share, ``[length of the share]``."""
        own = self._of(self.rank)
        size = len(local) // len(own)
        shifts = [size * (number - place) for place, number in enumerate(own)]
        return torch.cat([piece + shift for piece, shift in zip(local.tensor_split(len(own)), shifts, strict=True)])

    def whole(self, shares: Sequence[Tensor], dimension: int) -> Tensor:
        """The whole sequence from the shares of all ranks, in their order."""
        pieces: dict[int, Tensor] = {}
        for rank, share in enumerate(shares):
            own = self._of(rank)
            pieces |= zip(own, share.tensor_split(len(own), dimension), strict=True)
        return torch.cat([pieces[number] for number in range(self.pieces)], dimension)

    def _of(self, rank: int) -> list[int]:
        """The pieces of a rank, in order."""
        return [rank, self.pieces - 1 - rank] if self.paired else [rank]
