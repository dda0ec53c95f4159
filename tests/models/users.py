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


class Attention(nn.Module):
    """As timm has it: a fused product of queries, keys and values, reshaped by a number of heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.shape = 3, heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Apart(nn.Module):
    """As Llama has it: heads of which some share keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_width, kept = width // heads, width // 2
        self.q, self.k, self.v = (nn.Linear(width, size) for size in (width, kept, kept))
        self.o = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (heads.repeat_interleave(2, dim=1) for heads in (k, v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, kind):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = kind(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.fc1(self.norm2(x)).relu())


class Tokens(nn.Module):
    """A language model of a user, whose head is its embedding."""

    def __init__(self, width=16, heads=4, kind=Attention, vocabulary=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=1)
        self.blocks = nn.ModuleList(Block(width, heads, kind) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs):
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
