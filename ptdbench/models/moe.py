"""A decoder with a mixture of experts, which covers Mixtral, Qwen3-MoE and DeepSeek-V2."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from ptdbench.models.decoder import Block, CausalMix, Decoder, InputEmbedding
from ptdbench.models.experts import Experts, Mixture, Product, Router, RouterOptions
from ptdbench.models.llama import GroupedAttention, Rotary, SwiGLU, problems_of_heads, rotate
from ptdbench.models.protocol import Role
from ptdbench.problems import Problem, at_least, require


class MoE(Decoder):
    """The decoder: an embedding, blocks with one MLP, blocks with a mixture of experts, and a head.

    Args:
        layers: Number of blocks.
        dense_layers: How many of the first blocks have an MLP instead of experts.
        heads: Attention heads of a block.
        key_value_heads: Heads of keys and values; each serves the same number of ``heads``.
        head_width: Features of a head; ``auto``: ``width / heads``.
        head_norm: Whether queries and keys are normalized per head, as in Qwen3.
        latent_width: Features of the latent from which keys and values are computed (DeepSeek-V2, arXiv 2405.04434);
            ``none``: no latent.
        rotary_width: With a latent: features of a head that are rotated, in addition to ``head_width`` that are not.
        width: Features of a token.
        hidden: Features between the linear layers of an MLP; 0 if no block has one.
        experts: Experts of a block.
        active: Number of experts for each token.
        expert_hidden: Features between the linear layers of an expert.
        shared_experts: Number of experts for all tokens, computed as one MLP.
        capacity: Maximum tokens of a rank's micro-batch for an expert, as a multiple of its fair share; the rest are
            dropped, so losses change and depend on the layout. ``none``: no token is dropped.
        product: How experts compute: ``grouped``, by one kernel, whose rows must be multiples of 16 bytes, or ``loop``;
            equal within rounding.
        router: Options of :class:`ptdbench.models.experts.RouterOptions`.
        sequence_length: Tokens of a sequence, also for :meth:`train_flops`.
        vocabulary: Number of different tokens.
        tie_weights: Whether the head's projection is the token embedding.
        rope_theta: Base of the rotary frequencies.
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
        experts: int,
        active: int,
        expert_hidden: int,
        hidden: int = 0,
        dense_layers: int = 0,
        shared_experts: int = 0,
        head_width: int | Literal["auto"] = "auto",
        head_norm: bool = False,
        latent_width: int | Literal["none"] = "none",
        rotary_width: int = 0,
        capacity: float | Literal["none"] = "none",
        product: Product = "grouped",
        router: Mapping[str, Any] | None = None,
        sequence_length: int = 4096,
        vocabulary: int = 32000,
        tie_weights: bool = False,
        rope_theta: float = 10000.0,
        norm_epsilon: float = 1e-5,
    ) -> None:
        routing = RouterOptions(**(router or {}))
        counted = {"layers": layers, "experts": experts, "active": active, "expert_hidden": expert_hidden}
        require(
            *at_least(1, **counted, sequence_length=sequence_length),
            *at_least(0, dense_layers=dense_layers, shared_experts=shared_experts),
            *at_least(1 if dense_layers else 0, hidden=hidden),
            *at_least(2, vocabulary=vocabulary, rotary_width=rotary_width if latent_width != "none" else 2),
            *problems_of_heads(heads, key_value_heads, width, head_width),
            None if active <= experts else Problem("active", active, f"must not exceed experts={experts}"),
            None if dense_layers < layers else Problem("dense_layers", dense_layers, f"must be below layers={layers}"),
            None if capacity == "none" or capacity > 0 else Problem("capacity", capacity, "must be positive, or none"),
        )
        features = width // heads if head_width == "auto" else head_width
        norm = partial(nn.RMSNorm, width, norm_epsilon)

        def attention() -> nn.Module:
            if latent_width != "none":
                return LatentAttention(width, heads, features, latent_width, rotary_width, rope_theta)
            norms = [nn.RMSNorm(features, norm_epsilon) for _ in range(2)] if head_norm else None
            return GroupedAttention(width, heads, key_value_heads, Rotary(features, rope_theta, 1.0), norms)

        def mixture() -> Mixture:
            router = Router(width, experts, active, None if capacity == "none" else capacity, routing)
            shared = SwiGLU(width, shared_experts * expert_hidden) if shared_experts else None
            return Mixture(norm(), router, Experts(experts, width, expert_hidden, product), shared)

        super().__init__(
            InputEmbedding(vocabulary, width),
            (
                Block(attention(), SwiGLU(width, hidden), norm)
                if number < dense_layers
                else SparseBlock(attention(), mixture(), norm())
                for number in range(layers)
            ),
            norm(),
            groups=(key_value_heads, "key and value heads") if latent_width == "none" else (heads, "heads"),
            sequence_length=sequence_length,
            tie_weights=tie_weights,
        )
        self.has_latent = latent_width != "none"
        #: Features of all heads' keys and values, for scores and mixing.
        self.pair_width = heads * (2 * features + (rotary_width if self.has_latent else 0))
        self.experts = experts
        self.active = active

    def _unmet(self, module: nn.Module) -> int:
        routed = sum(p.numel() for part in module.modules() if isinstance(part, Experts) for p in part.parameters())
        return routed // self.experts * (self.experts - self.active)

    def _multiplied(self, block: nn.Module) -> float:
        """Count, of the experts, only those that a token chooses, even if it is dropped."""
        return super()._multiplied(block) - self._unmet(block)

    def _pair_flops(self) -> float:
        return 2.0 * self.sequence_length**2 * self.pair_width

    def _block_roles(self) -> dict[str, Role]:
        """Split whole experts; each rank computes the whole latent, and from it its heads' keys and values."""
        positions = (self.sequence_length, "positions")
        return {
            **super()._block_roles(),
            "attention.query": Role("colwise", *self.groups),
            "attention.latent": Role("replicated"),
            "attention.latent_norm": Role("replicated"),
            "attention.key_value": Role("local_colwise", *self.groups),
            "attention.norms": Role("replicated"),
            "attention.mix": Role("attention", *self.groups, is_causal=not self.has_latent),
            "mixture": Role("split_sequence", *positions),
            "mixture.router.positions": Role("positions", *positions),
            "mixture.experts": Role("experts", self.experts, "experts"),
        }

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Start routers with equal loads and no bias, and initialize the rest as other decoders."""
        if name.endswith("router.load"):
            nn.init.constant_(tensor, 1 / self.experts)
        else:
            super().reset(name, tensor, generator)


class SparseBlock(nn.Module):
    """Attention, then a mixture of experts, each computed from the normalized stream and added to it."""

    def __init__(self, attention: nn.Module, mixture: Mixture, norm: nn.Module) -> None:
        super().__init__()
        self.attention_norm = norm
        self.attention = attention
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(x)


class LatentAttention(nn.Module):
    """Attention with keys and values from a latent of each token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Positions rotate ``rotary_width`` features of each head's query, and of a key that all heads share; no YaRN scaling.
    """

    def __init__(
        self, width: int, heads: int, head_width: int, latent_width: int, rotary_width: int, rope_theta: float
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.latent_width = latent_width
        self.rotary_width = rotary_width
        self.query = nn.Linear(width, heads * (head_width + rotary_width), bias=False)
        self.latent = nn.Linear(width, latent_width + rotary_width, bias=False)
        self.latent_norm = nn.RMSNorm(latent_width, 1e-6)
        self.key_value = nn.Linear(latent_width, heads * 2 * head_width, bias=False)
        self.rotary = Rotary(rotary_width, rope_theta, 1.0)
        self.mix = CausalMix()
        self.output = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        angles = self.rotary(torch.arange(x.shape[1], device=x.device))
        widths = [self.head_width, self.rotary_width]
        still, turned = self.query(x).unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, dim=-1)
        q = torch.cat([still, rotate(turned, angles)], dim=-1)
        latent, shared = self.latent(x).split([self.latent_width, self.rotary_width], dim=-1)
        of_heads = self.key_value(self.latent_norm(latent)).unflatten(-1, (-1, 2 * self.head_width)).transpose(1, 2)
        key, v = of_heads.chunk(2, dim=-1)
        shared = rotate(shared, angles).unsqueeze(1).expand(-1, key.shape[1], -1, -1)
        mixed = self.mix(q, torch.cat([key, shared], dim=-1), v)
        return self.output(mixed.transpose(1, 2).flatten(2))
