"""A Llama as torchtitan wrote it and torch 2.6 computed it in December 2024, for logs of what was measured then.

RMS norms became a fused kernel in torch 2.8, and cuDNN's attention the default on Hopper in 2.11.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.models import llama

torch.backends.cuda.enable_cudnn_sdp(False)


class Norm(nn.RMSNorm):
    """An RMS norm as a composite of operators."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        wide = x.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(self.eps or 0.0).rsqrt()
        return wide.mul(scale).type_as(x) * self.weight


class Attention(nn.Module):
    """Attention with a matrix each for queries, keys and values, complex rotations, and keys repeated for each head."""

    def __init__(self, of: llama.GroupedAttention) -> None:
        super().__init__()
        width, heads = of.output.weight.shape[0], of.output.weight.shape[1] // of.head_width
        sizes = (heads * of.head_width, *[heads // of.queries * of.head_width] * 2)
        self.query, self.key, self.value = (nn.Linear(width, size, bias=False) for size in sizes)
        self.queries, self.head_width, self.rotary, self.output = of.queries, of.head_width, of.rotary, of.output

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)) for part in (self.query, self.key, self.value))
        angles = self.rotary(torch.arange(x.shape[1], device=x.device))[:, None]
        turns = torch.polar(torch.ones_like(angles), angles)
        q, k = (_turned(part, turns) for part in (q, k))
        k, v = (part[:, :, :, None].expand(-1, -1, -1, self.queries, -1).flatten(2, 3) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Llama(llama.Llama):
    """The decoder, with these norms and attentions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            of = block.attention
            assert isinstance(of, llama.GroupedAttention)
            block.attention = Attention(of)
        for module in self.modules():
            if type(module) is nn.RMSNorm:
                module.__class__ = Norm
