"""Models of a user, outside of the package."""

from torch import nn


class Plain(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 5))

    def forward(self, inputs):
        return self.net(inputs)


class First(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).tanh()


class Last(nn.Linear):
    def forward(self, inputs, targets=None):
        outputs = super().forward(inputs)
        return outputs if targets is None else (outputs - targets).abs().mean()


class OnlyParts(nn.Module):
    """A chain, two of whose parts share their weight; nothing about layers, costs or initial values."""

    def __init__(self, width):
        super().__init__()
        self.start = First(6, width)
        self.before = First(width, width)
        self.blocks = nn.ModuleList(First(width, width) for _ in range(2))
        self.after = First(width, width)
        self.end = Last(width, 4)
        self.after.weight = self.before.weight

    def forward(self, inputs, targets=None):
        *chain, last = self.parts().values()
        for part in chain:
            inputs = part(inputs)
        return last(inputs, targets)

    def parts(self):
        names = ["start", "before", "blocks.0", "blocks.1", "after", "end"]
        return {name: self.get_submodule(name) for name in names}

    def tied(self):
        return [("before.weight", "after.weight")]


class Protocol(OnlyParts):
    """All that a module may say."""

    def layers(self):
        return list(self.blocks)

    def train_flops(self):
        return {name: 6.0 * part.weight.numel() for name, part in self.parts().items()}

    def reset(self, name, tensor, generator):
        nn.init.normal_(tensor, std=0.4, generator=generator)
