"""The load of other processes on a node, as a record has it: no torch is needed to read it."""

from __future__ import annotations

from msgspec import Struct

from ptdbench.terminal import rank_names

#: Thresholds of other load, in cores and as a fraction of a node's cores: even an idle machine has some.
LEAST_CORES, LEAST_SHARE = 0.1, 0.005


class OtherLoad(Struct, frozen=True):
    """The load of other processes on one node."""

    node: str  #: The node.
    cores: int  #: Number of cores that the ranks of the node may use.
    taken: float | None  #: Cores that other processes took, on average; null if the system does not say.
    gpu_ranks: list[int]  #: Ranks whose GPU other processes use.
    on_gpu: bool  #: Whether the ranks measured GPUs.

    @property
    def is_busy(self) -> bool:
        """True if this load may have slowed the measurement down."""
        if self.on_gpu:
            return bool(self.gpu_ranks)
        return self.taken is not None and self.taken > max(LEAST_CORES, LEAST_SHARE * self.cores)

    def slows(self, rank: int) -> bool:
        """Return whether this load may have slowed down this rank of the node."""
        return self.is_busy and (not self.on_gpu or rank in self.gpu_ranks)

    def __str__(self) -> str:
        if self.on_gpu:
            return f"other processes use the GPU{'s' * (len(self.gpu_ranks) > 1)} of {rank_names(self.gpu_ranks)}"
        return f"other processes took {self.taken or 0:.1f} of {self.cores} cores"
