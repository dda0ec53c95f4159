"""A model that breaks on purpose and says when: ``model._target_=benchmarks.gpu_cluster.victim.Victim``."""

from pathlib import Path

from torch import Tensor

from tests.launch.faulty import Faulty


class Victim(Faulty):
    """Fails in the third forward pass of one rank.

    Args:
        how: ``kill``, ``stop`` (SIGSTOP) or ``raise``.
        rank: On which rank.
        begun: A file that is made just before.
    """

    def __init__(self, how: str, rank: int, begun: str) -> None:
        super().__init__(how, rank)
        self.begun = Path(begun)

    def forward(self, inputs: Tensor) -> Tensor:
        """As a linear layer, until then."""
        if self.here and not inputs.is_meta and self.calls + 1 == self.call:
            self.begun.touch()
        return super().forward(inputs)
