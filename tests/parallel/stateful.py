"""A model with all kinds of state: every one of them changes the losses if it is lost, or changed once too often."""

import torch
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    """Counts its passes in a buffer, one replaced and one written in place, and in Python, and computes with these.

    Its norm is frozen: it stays in eval mode, as the constructor has put it.
    """

    def __init__(self, dropout: float, counts: bool, in_place: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False).eval()
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.counts, self.in_place, self.passes, self.history = counts, in_place, 0, []

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            if self.in_place:
                self.written += 1
            self.replaced = self.replaced + 1
            if self.counts:
                self.passes += 1
                self.history.append(self.passes)
        scale = (1 + 0.05 * self.written) / (1 + 0.02 * self.replaced + 0.03 * self.passes + 0.01 * len(self.history))
        return hidden + self.dropout(self.down(self.up(self.norm(hidden)).tanh())) * scale


class Backbone(nn.Module):
    """Keeps its own norm in eval mode by overriding ``train``; a pipeline cuts it open."""

    def __init__(self, dropout: float, counts: bool, in_place: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(192, WIDTH), nn.BatchNorm1d(WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dropout, counts, in_place) for _ in range(4))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.stem(inputs.flatten(1)))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Stateful(nn.Module):
    """For the digits; the head starts in training."""

    def __init__(self, dropout: float = 0.0, counts: bool = True, in_place: bool = True) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(dropout, counts, in_place), nn.Linear(WIDTH, 10)

    def roles(self) -> dict[str, str]:
        names = [f"backbone.blocks.{number}" for number in range(len(self.backbone.blocks))]
        return {f"{name}.{inner}": role for name in names for inner, role in (("up", "colwise"), ("down", "rowwise"))}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))
