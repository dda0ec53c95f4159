"""What a user brings along: the model of a command of the README, and a model, data and an optimizer of one kind."""

import torch
from torch import Tensor, nn


class MyModel(nn.Module):
    """Classifies images of 64x64 pixels into ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


class Mine(nn.Sequential):
    """A curve through :class:`Sines`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


class Sines:
    """Points of a sine, the k-th one by the number k alone."""

    workers = 0
    tokens_per_sample = None
    held_out = None
    identity = None

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def samples(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(start, stop, dtype=torch.float64) * 12.9898)[:, None]
        return x.float(), torch.sin(3 * x).float()

    def example(self) -> tuple[Tensor, Tensor]:
        return torch.empty(1, 1, device="meta"), torch.empty(1, 1, device="meta")


class SignSGD(torch.optim.Optimizer):
    """Steps of equal length, in the direction of the gradient's signs."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
