"""A GPT-2 style decoder: pre-norm, learned positions, tanh-GELU, causal attention, biases, no dropout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ptdbench.models.decoder import CausalMix, Decoder, Head
from ptdbench.models.protocol import Role
from ptdbench.problems import Problem, at_least, nearest_numbers, require, try_these


class GPT(Decoder):
    """The decoder: a chain of an embedding, equal blocks and a head.

    Implements :class:`ptdbench.models.protocol.Model`.

    Args:
        layers: Number of blocks.
        heads: Attention heads of a block; must divide ``width``.
        width: Features of a token.
        sequence_length: Maximum tokens of a sequence, and the length that :meth:`train_flops` counts.
        vocabulary: Number of different tokens. 50304 is GPT-2's 50257 rounded up to a multiple of 128, which
            is what matrix units like.
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
        super().__init__()
        require(*_problems(layers, heads, width, sequence_length, vocabulary))
        self.width = width
        self.heads = heads
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.embedding = Embedding(vocabulary, sequence_length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = Head(nn.LayerNorm(width), width, vocabulary)
        self.tie_weights = tie_weights
        if tie_weights:
            self.head.projection.weight = self.embedding.token.weight

    def train_flops(self) -> dict[str, float]:
        """FLOPs of forward and backward for one sequence, by part.

        Per token, forward (Kaplan et al. 2020, table 1; PaLM, Chowdhery et al. 2022, appendix B), with D the
        width, T the sequence length, V the vocabulary, 2 FLOPs a multiply-add:

        ========================  ===============  ============================
        queries, keys and values  2 · 3D²
        scores and mixing         2 · TD + 2 · TD  all T² pairs, not the causal half
        attention output          2 · D²
        MLP                       2 · 4D² + 2 · 4D²
        head                      2 · DV
        ========================  ===============  ============================

        Backward costs twice the forward. Attention is counted in full, as PaLM, nanoGPT and torchtitan do; what others
        leave out is :meth:`~ptdbench.models.decoder.Decoder.masked_flops`. The embedding, a look-up, costs nothing.
        """
        T, D, V = self.sequence_length, self.width, self.vocabulary
        block = 3.0 * T * (24 * D * D + 4 * T * D)
        head = 3.0 * T * 2 * D * V
        return {"embedding": 0.0, **{f"blocks.{i}": block for i in range(len(self.blocks))}, "head": head}

    def roles(self) -> dict[str, Role]:
        """Attention by heads, the MLP, and the vocabulary at both ends, as in Megatron-LM (Shoeybi et al. 2019)."""
        by_heads, vocabulary = (self.heads, "heads"), (self.vocabulary, "tokens")
        of_block = {
            "attention_norm": Role("entry"),
            "attention.query_key_value": Role("outputs", *by_heads),
            "attention.mix": Role("attention", *by_heads, is_causal=True),
            "attention.output": Role("inputs", *by_heads),
            "mlp_norm": Role("entry"),
            "mlp.up": Role("outputs"),
            "mlp.down": Role("inputs"),
        }
        return {
            "embedding": Role("stream", self.sequence_length, "positions"),
            "embedding.token": Role("vocabulary", *vocabulary),
            "embedding.position": Role("positions", self.sequence_length, "positions"),
            **{f"blocks.{i}.{name}": role for i in range(len(self.blocks)) for name, role in of_block.items()},
            "head.norm": Role("entry"),
            "head.projection": Role("vocabulary", *vocabulary),
            "head.cross_entropy": Role("loss"),
        }

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Initialize as GPT-2 does (Radford et al. 2019, section 2.3).

        Weights are normal with standard deviation 0.02. Those that write into the residual stream are smaller
        by √(2 · layers), the root of the number of such writes, so that depth does not amplify the stream.
        """
        if name.endswith(".bias"):
            nn.init.zeros_(tensor)
        elif "norm." in name:
            nn.init.ones_(tensor)
        elif name.endswith(("attention.output.weight", "mlp.down.weight")):
            nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * len(self.blocks)), generator=generator)
        else:
            nn.init.normal_(tensor, std=0.02, generator=generator)


class Embedding(nn.Module):
    """Token embedding plus position embedding."""

    def __init__(self, vocabulary: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(sequence_length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` in int64 to ``[batch, length, width]``."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Attention, then an MLP, each computed from the normalized stream and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention with several heads.

    The rows of the first matrix are laid out head by head, the queries, keys and values of one head together, so that a
    cut by heads is a cut of the matrix: with ``1/n`` of its rows, and of the columns of the second matrix, this module
    computes ``1/n`` of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = CausalMix()
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        # [batch, length, 3 * width] -> three of [batch, heads, length, width / heads]; transposed when they are apart,
        # or their gradients would be stacked and then copied once more
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


def _problems(layers: int, heads: int, width: int, sequence_length: int, vocabulary: int) -> list[Problem]:
    found = at_least(1, layers=layers, heads=heads, width=width, sequence_length=sequence_length)
    found += at_least(2, vocabulary=vocabulary)
    comparable = not {"heads", "width"} & {problem.option for problem in found}
    if comparable and width % heads:
        divisors = [number for number in range(1, width + 1) if width % number == 0]
        remedy = try_these(nearest_numbers(heads, divisors))
        found.append(Problem("heads", heads, f"must divide width={width}", remedy))
    return found
