"""A Llama-style decoder: RMS norms, rotary positions, SwiGLU, grouped-query attention, no biases, no dropout."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.models.decoder import Block, CausalMix, Decoder, InputEmbedding
from ptdbench.problems import Problem, at_least, divides, divisors, nearest_numbers, require, try_these

#: Llama 3's scaling of rotary frequencies: the sequence length that it extends, and the range of turns in that length
#: in which scaling is partial. Slower frequencies are divided by the whole factor, faster ones are unchanged.
SCALED_LENGTH, SLOW_TURNS, FAST_TURNS = 8192, 1, 4


class Llama(Decoder):
    """The decoder: a chain of an embedding, equal blocks and a head.

    Args:
        layers: Number of blocks.
        heads: Attention heads of a block; must divide ``width`` into even parts.
        key_value_heads: Heads of keys and values; each serves the same number of ``heads``.
        width: Features of a token.
        hidden: Features between the linear layers of an MLP.
        sequence_length: Tokens of a sequence, also for :meth:`train_flops`.
        vocabulary: Number of different tokens.
        tie_weights: Whether the head's projection is the token embedding.
        rope_theta: Base of the rotary frequencies: a larger base distinguishes positions over longer distances.
        rope_factor: Factor by which Llama 3's scaling stretches slow rotary frequencies; 1: no scaling.
        norm_epsilon: Epsilon that norms add to the mean square.

    Raises:
        ConfigError: With every invalid option.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        key_value_heads: int,
        width: int,
        hidden: int,
        sequence_length: int = 8192,
        vocabulary: int = 128256,
        tie_weights: bool = False,
        rope_theta: float = 500000.0,
        rope_factor: float = 1.0,
        norm_epsilon: float = 1e-5,
    ) -> None:
        require(
            *at_least(1, layers=layers, hidden=hidden, sequence_length=sequence_length),
            *at_least(2, vocabulary=vocabulary),
            *problems_of_heads(heads, key_value_heads, width),
            None if rope_theta > 1 else Problem("rope_theta", rope_theta, "must be greater than 1"),
            None if rope_factor >= 1 else Problem("rope_factor", rope_factor, "must be at least 1 (no scaling)"),
        )
        norm = partial(nn.RMSNorm, width, norm_epsilon)

        def block() -> Block:
            rotary = Rotary(width // heads, rope_theta, rope_factor)
            return Block(GroupedAttention(width, heads, key_value_heads, rotary), SwiGLU(width, hidden), norm)

        super().__init__(
            InputEmbedding(vocabulary, width),
            (block() for _ in range(layers)),
            norm(),
            groups=(key_value_heads, "key and value heads"),
            sequence_length=sequence_length,
            tie_weights=tie_weights,
        )


class Rotary(nn.Module):
    """The angles by which queries and keys are rotated, so that their product depends on the distance of positions.

    A table of angles would be a buffer, which DDP broadcasts and checkpoints store, or one more tensor to pass between
    stages.

    Args:
        head_width: Features of a head, which are rotated in pairs.
        theta: Base of the frequencies.
        factor: Factor by which slow frequencies are stretched.
    """

    def __init__(self, head_width: int, theta: float, factor: float) -> None:
        super().__init__()
        self.head_width = head_width
        self.theta = theta
        self.factor = factor

    def forward(self, positions: Tensor) -> Tensor:
        """Convert positions in a sequence, ``[length]``, to fp32 angles ``[length, head_width / 2]``."""
        exponents = torch.arange(0, self.head_width, 2, dtype=torch.float32, device=positions.device) / self.head_width
        frequencies = 1.0 / self.theta**exponents
        if self.factor != 1:
            turns = frequencies * SCALED_LENGTH / (2 * math.pi)
            kept = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / self.factor)
        return positions.float()[:, None] * frequencies


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of feature ``i`` of the first half and feature ``i`` of the second half, in fp32 or better.

    Args:
        x: ``[..., length, head_width]``.
        angles: ``[length, head_width / 2]``.
    """
    first, second = x.to(torch.promote_types(x.dtype, angles.dtype)).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal self-attention in groups of heads that share keys and values.

    The rows of the first matrix are laid out by group: the queries of its heads, then its key and its value. So
    splitting the groups splits the matrix: with ``1/n`` of its rows, and of the columns of the second matrix, this
    module computes ``1/n`` of the groups.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int,
        rotary: Rotary,
        norms: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.head_width = rotary.head_width
        self.queries = heads // key_value_heads
        self.query_key_value = nn.Linear(width, (heads + 2 * key_value_heads) * self.head_width, bias=False)
        self.norms = nn.ModuleList(norms) if norms else None  # for the queries and the keys of each head
        self.rotary = rotary
        self.mix = CausalMix()
        self.output = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        # [batch, groups, queries, key and value, length, head_width]
        groups = self.query_key_value(x).unflatten(-1, (-1, self.queries + 2, self.head_width)).permute(0, 2, 3, 1, 4)
        angles = self.rotary(torch.arange(groups.shape[-2], device=x.device))
        pairs, v = groups[:, :, :-1], groups[:, :, -1]
        if self.norms:
            pairs = torch.cat([self.norms[0](pairs[:, :, :-1]), self.norms[1](pairs[:, :, -1:])], dim=2)
        turned = rotate(pairs, angles)
        q, k = turned[:, :, :-1].flatten(1, 2), turned[:, :, -1]
        return self.output(self.mix(q, k, v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """An MLP whose hidden features are gated (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def problems_of_heads(
    heads: int, key_value_heads: int, width: int, head_width: int | Literal["auto"] = "auto"
) -> list[Problem | None]:
    """Return problems of attention heads; ``head_width``: features of a head, if not derived from ``width``."""
    if too_small := at_least(1, heads=heads, key_value_heads=key_value_heads, width=width):
        return [*too_small]
    of_head = None
    if head_width == "auto" and width % (2 * heads):
        fitting = [number for number in divisors(width) if width % (2 * number) == 0]
        rule = f"must divide width={width} into heads with an even number of features, which are rotated in pairs"
        of_head = Problem("heads", heads, rule, try_these(nearest_numbers(heads, fitting)))
    if head_width != "auto" and (head_width < 2 or head_width % 2):
        of_head = Problem("head_width", head_width, "must be even and at least 2: features are rotated in pairs")
    return [of_head, divides("key_value_heads", key_value_heads, heads, f"heads={heads}")]
