"""A GPT-2-style decoder: pre-norm, learned positions, tanh-GELU, causal attention, biases, no dropout."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.models.decoder import Block, CausalMix, Decoder, InputEmbedding
from ptdbench.problems import at_least, divides, require


class GPT(Decoder):
    """The decoder: a chain of an embedding, equal blocks and a head.

    Args:
        layers: Number of blocks.
        heads: Attention heads of a block; must divide ``width``.
        width: Features of a token.
        sequence_length: Maximum tokens of a sequence, also for :meth:`train_flops`.
        vocabulary: Number of different tokens. 50304 is GPT-2's 50257 rounded up to a multiple of 128, which matrix
            units prefer.
        tie_weights: Whether the head's projection is the token embedding, as in GPT-2.

    Raises:
        ConfigError: With every invalid option.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        sequence_length: int = 1024,
        vocabulary: int = 50304,
        tie_weights: bool = True,
    ) -> None:
        too_small = at_least(1, layers=layers, heads=heads, width=width, sequence_length=sequence_length)
        is_divisible = not {"heads", "width"} & {problem.option for problem in too_small}
        require(
            *too_small,
            *at_least(2, vocabulary=vocabulary),
            divides("heads", heads, width, f"width={width}") if is_divisible else None,
        )
        norm = partial(nn.LayerNorm, width)
        super().__init__(
            InputEmbedding(vocabulary, width, sequence_length),
            (Block(MultiHeadAttention(width, heads), MLP(width), norm) for _ in range(layers)),
            norm(),
            groups=(heads, "heads"),
            sequence_length=sequence_length,
            tie_weights=tie_weights,
        )


class MultiHeadAttention(nn.Module):
    """Causal self-attention with several heads.

    The rows of the first matrix are laid out by head, each head's query, key and value together. So splitting the heads
    splits the matrix: with ``1/n`` of its rows, and of the columns of the second matrix, this module computes ``1/n``
    of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = CausalMix()
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        # [batch, length, 3 * width] -> three of [batch, heads, length, width / heads]; unbind before transposing, or
        # the gradients would be stacked and then copied once more
        apart = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_width)).unbind(-2)
        q, k, v = (part.transpose(1, 2) for part in apart)
        return self.output(self.mix(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))
