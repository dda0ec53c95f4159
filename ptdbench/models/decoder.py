"""The chain that language models share: a token embedding, equal blocks and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.models.linear_cross_entropy import LinearCrossEntropy, master_of


class Decoder(nn.Module):
    """A decoder as a chain; what it is made of, its FLOPs, roles and initial values are its subclass's."""

    embedding: nn.Module  #: Tokens to the stream; its ``token`` is an ``nn.Embedding``.
    blocks: nn.ModuleList  #: From stream to stream.
    head: nn.Module  #: A :class:`Head`.
    tie_weights: bool  #: Whether the head's projection is the token embedding.
    width: int  #: Features of a token.
    sequence_length: int  #: Tokens of a sequence for which FLOPs are counted.

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: ``[batch, length]``, int64, at most as long as the model is built for.
            targets: ``[batch, length]``, int64: the token that follows each one of ``tokens``.

        Returns:
            Logits ``[batch, length, vocabulary]``, or with ``targets`` the mean cross entropy, an fp32
            scalar.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)

    def layers(self) -> list[nn.Module]:
        """The blocks, in order."""
        return list(self.blocks)

    def parts(self) -> dict[str, nn.Module]:
        """``embedding``, ``blocks.0``, ``blocks.1``, ..., ``head``."""
        blocks = {f"blocks.{i}": block for i, block in enumerate(self.blocks)}
        return {"embedding": self.embedding, **blocks, "head": self.head}

    def masked_flops(self) -> float:
        """Half of the scores and of the mixing, forward and backward: 3 · 4T²D / 2 a block."""
        return 6.0 * self.sequence_length**2 * self.width * len(self.blocks)

    def tied(self) -> list[tuple[str, str]]:
        """The token embedding and the head's projection, if they are one weight."""
        return [("embedding.token.weight", "head.projection.weight")] if self.tie_weights else []


class CausalMix(nn.Module):
    """The values of each head, weighted by its attention to a position and those before."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three of ``[batch, heads, length, head width]`` to one; keys and values may be of fewer heads."""
        if q.shape[1] != k.shape[1] and not _has_grouped_kernel(q):
            k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _has_grouped_kernel(q: Tensor) -> bool:
    """Whether a kernel that keeps no whole scores takes fewer heads of keys: on CUDA flash attention, since Ampere."""
    return not q.is_cuda or (q.dtype != torch.float32 and torch.cuda.get_device_properties(q.device).major >= 8)


class Head(nn.Module):
    """Final norm and projection to the vocabulary, with the loss when there are targets to compare with."""

    def __init__(self, norm: nn.Module, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = norm
        self.projection = nn.Linear(width, vocabulary, bias=False)
        self.cross_entropy = LinearCrossEntropy()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` to logits ``[batch, length, vocabulary]``, or the mean loss in fp32."""
        x = self.norm(x)
        if targets is None:
            return self.projection(x)
        # A narrow copy stands before its weight, which can take the gradient as it is summed, in fp32.
        loss: Tensor = self.cross_entropy(x, self.projection.weight, targets, master_of(self.projection))
        return loss
