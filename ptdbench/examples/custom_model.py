"""A minimal custom model: ``python train.py model=custom`` trains it."""

from torch import Tensor, nn


class MyModel(nn.Module):
    """Maps vectors of 32 numbers to vectors of 8, for ``data=synthetic_vectors``."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, 32]`` to ``[batch, 8]``."""
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)
