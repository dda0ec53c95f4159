"""A small task that is learned in seconds: which of six numbers is the largest, told by a net with a batch norm."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ptdbench.data.protocol import Data, HeldOut, draws
from ptdbench.models.protocol import FlopsUnknown

CLASSES = 6
HELD_OUT = 101  # a prime: no number of ranks divides it


#: The options of a run that learns it.
TASK = (
    "data=synthetic_vectors", "~data.inputs", "~data.outputs", f"data._target_={__name__}.Largest",
    "model=custom", f"model._target_={__name__}.Net", "device=cpu", "cluster.cpus_per_rank=1", "train.global_batch=24",
    "optimizer.lr=1e-2",
)  # fmt: skip


def numbers(seed: int, start: int, stop: int) -> Tensor:
    bits = draws(seed, start * CLASSES, stop * CLASSES)
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)).reshape(-1, CLASSES)


class Largest(Data):
    tokens_per_sample = None

    def __init__(self, *, seed: int, workers: int = 0, edition: str = "first") -> None:
        self.seed = seed
        self.workers = workers
        self._edition = edition

    @property
    def held_out(self) -> HeldOut | None:
        return Kept()

    @property
    def identity(self) -> str:
        return self._edition

    def prepare(self) -> None:
        pass

    def samples(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        values = numbers(self.seed, start, stop)
        return values, values.argmax(1)

    def example(self) -> tuple[Tensor, Tensor]:
        return torch.empty(1, CLASSES, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")


class Kept(HeldOut):
    bytes_per_token = None

    def __len__(self) -> int:
        return HELD_OUT

    def samples(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert 0 <= start < stop <= HELD_OUT
        values = numbers(12345, start, stop)
        return values, values.argmax(1)


class Reveals(Largest):
    def samples(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return torch.arange(start, stop), torch.full((stop - start,), os.getpid())

    def example(self) -> tuple[Tensor, Tensor]:
        targets = super().example()[1]
        return targets, targets


class Net(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 3, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, norm, dropout) for _ in range(blocks))
        self.last = Last(width)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x, targets)

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def parts(self) -> dict[str, nn.Module]:
        return {"first": self.first, **{f"blocks.{i}": b for i, b in enumerate(self.blocks)}, "last": self.last}

    def train_flops(self) -> dict[str, float]:
        raise FlopsUnknown("not counted")

    def tied(self) -> list[tuple[str, str]]:
        return []

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if tensor.dim() > 1:
            nn.init.kaiming_normal_(tensor, generator=generator)
        elif name.endswith(("norm.weight", "running_var")):
            nn.init.ones_(tensor)
        else:
            nn.init.zeros_(tensor)


class Block(nn.Module):
    def __init__(self, width: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.norm(self.linear(x)))
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Scaled(Net):
    """Its blocks divide by running scales, which make replicas of them differ."""

    def __init__(self, replaces: bool = True) -> None:
        super().__init__(norm=False)
        for block in self.blocks:
            block.norm = Scale(replaces)  # type: ignore[union-attr]

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if ".norm." in name:
            nn.init.ones_(tensor)
        else:
            super().reset(name, tensor, generator)


class Scale(nn.Module):
    """Moves two scales that it reads, also in evaluations; one is not persistent and may be replaced. It draws, too."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("kept", torch.ones(()))
        self.register_buffer("passing", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().abs().mean() + torch.rand(())
        self.kept.lerp_(now, 0.5)
        if self.replaces:
            self.passing = self.passing.lerp(now, 0.1)
        else:
            self.passing.lerp_(now, 0.1)
        return x / (self.kept + self.passing)


class Drifting(Net):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.passes = number, 0
        self.shift = nn.Parameter(torch.zeros(CLASSES), requires_grad=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        self.passes += 1
        if self.passes == self.number:
            self.shift.data.copy_(x.mean(0))
        return super().forward(x - self.shift, targets)


class Last(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, CLASSES)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        outputs = super().forward(x)
        return outputs if targets is None else F.cross_entropy(outputs, targets)


class Margin(nn.Linear):
    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__(CLASSES, outputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.multi_margin_loss(outputs, targets)


class OneLogit(Margin):
    """Tells only whether the largest number is among the first three."""

    def __init__(self) -> None:
        super().__init__(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), (targets < 3).float())


class WithTargets(Margin):
    """Returns its loss from forward, and has outputs too."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        outputs = super().forward(inputs)
        return outputs if targets is None else self.loss(outputs, targets)


class OnlyLoss(WithTargets):
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(inputs, targets)


class Unlearning:
    """A learning rate that makes a model better for four steps, and worse for ever after."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0 if step < 4 else -3.0
