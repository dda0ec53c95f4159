"""The common base of language models: a chain of embedding, blocks and head, its FLOPs, roles and initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ptdbench.models.protocol import Role


class Decoder(nn.Module):
    """A decoder as a chain of an embedding, blocks and a head; implements :class:`ptdbench.models.protocol.Model`.

    Args:
        embedding: Maps tokens to the stream.
        blocks: Map the stream to the stream.
        norm: Normalizes the input of the head's projection.
        groups: Number of head groups that tensor parallelism keeps whole, and their name.
        sequence_length: Tokens of a sequence for which FLOPs are counted.
        tie_weights: Whether the head's projection is the token embedding.
    """

    def __init__(
        self,
        embedding: InputEmbedding,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        *,
        groups: tuple[int, str],
        sequence_length: int,
        tie_weights: bool,
    ) -> None:
        super().__init__()
        self.vocabulary, self.width = embedding.token.weight.shape
        self.groups = groups
        self.sequence_length = sequence_length
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = Head(norm, self.width, self.vocabulary)
        self.tie_weights = tie_weights
        if tie_weights:
            self.head.projection.weight = embedding.token.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: ``[batch, length]``, int64, with a length of at most ``sequence_length``.
            targets: ``[batch, length]``, int64: the token that follows each of ``tokens``.

        Returns:
            Logits ``[batch, length, vocabulary]``, or with ``targets`` the mean cross entropy, an fp32 scalar.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)

    def layers(self) -> list[nn.Module]:
        """Return the blocks, in order."""
        return list(self.blocks)

    def parts(self) -> dict[str, nn.Module]:
        """Return ``embedding``, ``blocks.0``, ``blocks.1``, ..., ``head``."""
        blocks = {f"blocks.{i}": block for i, block in enumerate(self.blocks)}
        return {"embedding": self.embedding, **blocks, "head": self.head}

    def train_flops(self) -> dict[str, float]:
        """Return the FLOPs of forward and backward pass for one sequence, by part.

        In the forward pass, multiplying a token by a matrix of n elements takes 2n FLOPs (Kaplan et al. 2020, table 1;
        PaLM, Chowdhery et al. 2022, appendix B); the backward pass takes twice as many. Scores and mixing count all T²
        pairs of positions, as in PaLM, nanoGPT and torchtitan; :meth:`masked_flops` is the part that others omit. The
        embedding is a look-up and costs nothing.
        """
        T, pairs = self.sequence_length, 3.0 * self._pair_flops()
        blocks = {f"blocks.{i}": 6.0 * T * self._multiplied(block) + pairs for i, block in enumerate(self.blocks)}
        return {"embedding": 0.0, **blocks, "head": 6.0 * T * self.width * self.vocabulary}

    def masked_flops(self) -> float:
        """Return half of the FLOPs of scores and mixing, forward and backward."""
        return 1.5 * self._pair_flops() * len(self.blocks)

    def _multiplied(self, block: nn.Module) -> float:
        """Return the number of elements of a block's matrices that multiply a token."""
        return sum(weight.numel() for weight in block.parameters() if weight.dim() > 1)

    def _pair_flops(self) -> float:
        """Return the forward FLOPs of a block's scores and mixing: 2 · T²D each, where D is the width."""
        return 4.0 * self.sequence_length**2 * self.width

    def roles(self) -> dict[str, Role]:
        """Split attention by heads, the MLP, and the vocabulary at both ends, as Megatron-LM (Shoeybi et al. 2019)."""
        vocabulary, positions = (self.vocabulary, "tokens"), (self.sequence_length, "positions")
        of_block = self._block_roles()
        named = {
            "embedding": Role("scatter", *positions),
            "embedding.token": Role("vocabulary", *vocabulary),
            "embedding.position": Role("positions", *positions),
            **{f"blocks.{i}.{name}": role for i in range(len(self.blocks)) for name, role in of_block.items()},
            "head.norm": Role("sequence"),
            "head.projection": Role("vocabulary", *vocabulary),
            "head.cross_entropy": Role("loss"),
        }
        modules = {name for name, _ in self.named_modules()}
        return {name: role for name, role in named.items() if name in modules}

    def _block_roles(self) -> dict[str, Role]:
        """Return the roles of the modules that a block may have, by name in the block."""
        return {
            "attention_norm": Role("sequence"),
            "attention.query_key_value": Role("colwise", *self.groups),
            "attention.rotary": Role("positions", self.sequence_length, "positions"),
            "attention.mix": Role("attention", *self.groups, is_causal=True),
            "attention.output": Role("rowwise", *self.groups),
            "mlp_norm": Role("sequence"),
            "mlp.gate": Role("colwise"),
            "mlp.up": Role("colwise"),
            "mlp.down": Role("rowwise"),
        }

    def tied(self) -> list[tuple[str, str]]:
        """Return the token embedding and the head's projection, if they are tied."""
        return [("embedding.token.weight", "head.projection.weight")] if self.tie_weights else []

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Initialize as in GPT-2 (Radford et al. 2019, section 2.3).

        Weights are normal with standard deviation 0.02. Those that write to the residual stream are divided by
        √(2 · layers), the root of the number of writes, so that depth does not amplify the stream.
        """
        if name.endswith(".bias"):
            nn.init.zeros_(tensor)
        elif "norm" in name:
            nn.init.ones_(tensor)
        elif name.endswith(("attention.output.weight", "down.weight", "experts.down")):
            nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * len(self.blocks)), generator=generator)
        else:
            nn.init.normal_(tensor, std=0.02, generator=generator)


class InputEmbedding(nn.Module):
    """Token embedding, plus an embedding of up to ``positions`` positions."""

    def __init__(self, vocabulary: int, width: int, positions: int | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width) if positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` in int64 to ``[batch, length, width]``."""
        x: Tensor = self.token(tokens)
        return x if self.position is None else x + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Attention, then an MLP, each computed from the normalized stream and added to it."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CausalMix(nn.Module):
    """The values of each head, weighted by its attention to a position and earlier ones."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three of ``[batch, heads, length, head width]`` to one; keys and values may have fewer heads."""
        if q.shape[1] != k.shape[1] and not _has_grouped_kernel(q):
            k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _has_grouped_kernel(q: Tensor) -> bool:
    """Whether a fused kernel supports fewer heads of keys; on CUDA, flash attention does from Ampere on."""
    return not q.is_cuda or (q.dtype != torch.float32 and torch.cuda.get_device_properties(q.device).major >= 8)


class Head(nn.Module):
    """Final norm and projection to the vocabulary; computes the loss if there are targets."""

    def __init__(self, norm: nn.Module, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = norm
        self.projection = nn.Linear(width, vocabulary, bias=False)
        self.cross_entropy: nn.Module = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` to logits ``[batch, length, vocabulary]``, or the mean loss in fp32."""
        logits: Tensor = self.projection(self.norm(x))
        if targets is None:
            return logits
        loss: Tensor = self.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
        return loss
