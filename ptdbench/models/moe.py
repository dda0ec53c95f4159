"""A decoder with a mixture of experts, by which Mixtral, Qwen3-MoE and DeepSeek-V2 are described."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from ptdbench.models.decoder import CausalMix, Decoder, Head
from ptdbench.models.experts import Experts, Mixture, Product, Router, Routing
from ptdbench.models.llama import (
    Attention,
    Block,
    Embedding,
    Rotary,
    SwiGLU,
    from_llama,
    problems_of_heads,
    turn,
)
from ptdbench.models.protocol import Role
from ptdbench.problems import Problem, at_least, require


class MoE(Decoder):
    """The decoder: an embedding, blocks with one MLP, blocks with a mixture of experts, and a head.

    Implements :class:`ptdbench.models.protocol.Model`.

    Args:
        layers: Number of blocks.
        dense_layers: How many of them, from the first on, have an MLP instead of experts.
        heads: Attention heads of a block.
        key_value_heads: Heads of keys and values, each of which serves equally many ``heads``.
        head_width: Features of a head; ``auto``: ``width / heads``.
        head_norm: Whether queries and keys are normalized, each head by itself, as Qwen3 does.
        latent_width: Features of the latent that keys and values are made of (DeepSeek-V2, arXiv 2405.04434); ``none``:
            there is no latent.
        rotary_width: With a latent: features of a head that are turned, beside ``head_width`` that are not.
        width: Features of a token.
        hidden: Features between the linear layers of an MLP; 0 if no block has one.
        experts: Experts of a block.
        active: How many of them each token goes to.
        expert_hidden: Features between the linear layers of an expert.
        shared_experts: Experts that all tokens go to, computed as one MLP.
        capacity: Most tokens that an expert takes of a rank's micro-batch, as a multiple of its fair share; more are
            dropped, which changes the numbers, and by layout. ``none``: all tokens are computed.
        product: How experts compute: ``grouped``, one kernel for all of them, or ``loop``; equal within rounding.
        router: Options of :class:`ptdbench.models.experts.Routing`.
        sequence_length: Tokens of a sequence, and the length that :meth:`train_flops` counts.
        vocabulary: Number of different tokens.
        tie_weights: Whether the head's projection is the token embedding.
        rope_theta: Base of the rotary frequencies.
        norm_epsilon: What norms add to the mean square.

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
        super().__init__()
        routing = Routing.of(router or {})
        counted = {"layers": layers, "experts": experts, "active": active, "expert_hidden": expert_hidden}
        require(
            *at_least(1, **counted, sequence_length=sequence_length),
            *at_least(0, dense_layers=dense_layers, shared_experts=shared_experts),
            *at_least(1 if dense_layers else 0, hidden=hidden),
            *at_least(2, vocabulary=vocabulary, rotary_width=rotary_width if latent_width != "none" else 2),
            *problems_of_heads(heads, key_value_heads, width, head_width),
            None if active <= experts else Problem("active", active, f"must not exceed experts={experts}"),
            None if dense_layers < layers else Problem("dense_layers", dense_layers, f"must be below layers={layers}"),
            None if capacity == "none" or capacity > 0 else Problem("capacity", capacity, "must be above 0, or none"),
        )
        self.width = width
        self.heads = heads
        self.key_value_heads = key_value_heads
        self.head_width = width // heads if head_width == "auto" else head_width
        self.latent_width = latent_width
        self.rotary_width = rotary_width
        self.experts = experts
        self.active = active
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.embedding = Embedding(vocabulary, width)

        def attention() -> nn.Module:
            if latent_width != "none":
                return LatentAttention(width, heads, self.head_width, latent_width, rotary_width, rope_theta)
            rotary = Rotary(self.head_width, rope_theta, 1.0)
            norms = [nn.RMSNorm(self.head_width, norm_epsilon) for _ in range(2)] if head_norm else None
            return Attention(width, heads, key_value_heads, rotary, norms)

        def mixture() -> Mixture:
            router = Router(width, experts, active, None if capacity == "none" else capacity, routing)
            shared = SwiGLU(width, shared_experts * expert_hidden) if shared_experts else None
            chosen = Experts(experts, width, expert_hidden, product)
            return Mixture(nn.RMSNorm(width, norm_epsilon), router, chosen, shared)

        self.blocks = nn.ModuleList(
            Block(attention(), SwiGLU(width, hidden), width, norm_epsilon)
            if number < dense_layers
            else SparseBlock(attention(), mixture(), width, norm_epsilon)
            for number in range(layers)
        )
        self.head = Head(nn.RMSNorm(width, norm_epsilon), width, vocabulary)
        self.tie_weights = tie_weights
        if tie_weights:
            self.head.projection.weight = self.embedding.token.weight

    def active_parameters(self) -> int:
        """Number of parameters that a token meets: all but the experts that it does not go to."""
        total = sum(parameter.numel() for parameter in self.parameters())
        routed = sum(p.numel() for part in self.modules() if isinstance(part, Experts) for p in part.parameters())
        return total - routed // self.experts * (self.experts - self.active)

    def train_flops(self) -> dict[str, float]:
        """FLOPs of forward and backward for one sequence, by part; of experts those that a token goes to.

        A product of a token with a matrix of n numbers is 2n FLOPs forward. Scores and mixing are those of all T²
        pairs of positions, as for :meth:`ptdbench.models.llama.Llama.train_flops`. Dropped tokens are counted.
        """

        def of_part(part: nn.Module) -> float:
            numbers = 0.0
            for module in part.modules():
                share = self.active / self.experts if isinstance(module, Experts) else 1.0
                numbers += share * sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
            return numbers

        T = self.sequence_length
        found = {name: 6.0 * T * of_part(part) for name, part in self.parts().items()}
        pairs = {name: 3.0 * self._pair_flops() for name in found if name.startswith("blocks.")}
        head = 6.0 * T * self.width * self.vocabulary
        return {"embedding": 0.0, **{name: found[name] + pairs[name] for name in pairs}, "head": head}

    def masked_flops(self) -> float:
        """Half of the scores and of the mixing."""
        return 1.5 * self._pair_flops() * len(self.blocks)

    def _pair_flops(self) -> float:
        """FLOPs of a block's scores and mixing, forward."""
        turned = self.rotary_width if self.latent_width != "none" else 0
        return 2.0 * self.sequence_length**2 * self.heads * (2 * self.head_width + turned)

    def roles(self) -> dict[str, Role]:
        """As for :meth:`ptdbench.models.llama.Llama.roles`; experts are divided whole.

        A latent is made whole on each rank, and the keys and values of its heads made of it.
        """
        has_latent, vocabulary = self.latent_width != "none", (self.vocabulary, "tokens")
        heads = (self.heads, "heads") if has_latent else (self.key_value_heads, "key and value heads")
        positions = (self.sequence_length, "positions")
        by_latent = {
            "attention.query": Role("outputs", *heads),
            "attention.latent": Role("each"),
            "attention.latent_norm": Role("each"),
            "attention.key_value": Role("outputs_of_each", *heads),
        }
        of_block = {
            "attention_norm": Role("entry"),
            **(by_latent if has_latent else {"attention.query_key_value": Role("outputs", *heads)}),
            "attention.norms": Role("each"),
            "attention.rotary": Role("positions", *positions),
            "attention.mix": Role("attention", *heads, is_causal=not has_latent),
            "attention.output": Role("inputs", *heads),
            "mlp_norm": Role("entry"),
            "mlp.gate": Role("outputs"),
            "mlp.up": Role("outputs"),
            "mlp.down": Role("inputs"),
            "mixture": Role("tokens", *positions),
            "mixture.router.positions": Role("positions", *positions),
            "mixture.experts": Role("experts", self.experts, "experts"),
        }
        named = {
            "embedding": Role("stream", *positions),
            "embedding.token": Role("vocabulary", *vocabulary),
            **{f"blocks.{i}.{name}": role for i in range(len(self.blocks)) for name, role in of_block.items()},
            "head.norm": Role("entry"),
            "head.projection": Role("vocabulary", *vocabulary),
            "head.cross_entropy": Role("loss"),
        }
        here = {name for name, _ in self.named_modules()}
        return {name: role for name, role in named.items() if name in here}

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Initialize as :class:`ptdbench.models.gpt.GPT` does; routers begin with equal loads and no bias."""
        if "norm" in name:
            nn.init.ones_(tensor)
        elif name.endswith("router.load"):
            nn.init.constant_(tensor, 1 / self.experts)
        elif name.endswith("router.bias"):
            nn.init.zeros_(tensor)
        elif name.endswith(("attention.output.weight", "down.weight", "experts.down")):
            nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * len(self.blocks)), generator=generator)
        else:
            nn.init.normal_(tensor, std=0.02, generator=generator)


class SparseBlock(nn.Module):
    """Attention, then a mixture of experts, each computed from the normalized stream and added to it."""

    def __init__(self, attention: nn.Module, mixture: Mixture, width: int, norm_epsilon: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, norm_epsilon)
        self.attention = attention
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(x)


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of a latent of each token (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Positions turn ``rotary_width`` features of a head, and of a key that all heads share. Without YaRN's scaling.
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
        both = [self.head_width, self.rotary_width]
        still, turned = self.query(x).unflatten(-1, (-1, sum(both))).transpose(1, 2).split(both, dim=-1)
        q = torch.cat([still, turn(turned, angles)], dim=-1)
        latent, shared = self.latent(x).split([self.latent_width, self.rotary_width], dim=-1)
        of_heads = self.key_value(self.latent_norm(latent)).unflatten(-1, (-1, 2 * self.head_width)).transpose(1, 2)
        key, v = of_heads.chunk(2, dim=-1)
        shared = turn(shared, angles).unsqueeze(1).expand(-1, key.shape[1], -1, -1)
        mixed = self.mix(q, torch.cat([key, shared], dim=-1), v)
        return self.output(mixed.transpose(1, 2).flatten(2))


def from_transformers(state: Mapping[str, Tensor], key_value_heads: int) -> dict[str, Tensor]:
    """The weights of a ``transformers`` Mixtral or Qwen3-MoE without dense layers, for :meth:`MoE.load_state_dict`.

    Args:
        state: The state dict of the model for causal language modeling; experts are stacked, as since version 5.
        key_value_heads: Heads of keys and values of a block.
    """
    of_mixture = {
        "post_attention_layernorm.weight": "norm.weight",
        "mlp.gate.weight": "router.weight",
        "mlp.experts.gate_up_proj": "experts.gate_up",
        "mlp.experts.down_proj": "experts.down",
    }
    of_attention = {
        "self_attn.q_norm.weight": "attention.norms.0.weight",
        "self_attn.k_norm.weight": "attention.norms.1.weight",
    }
    weights, others = {}, {}
    for name, tensor in state.items():
        if not name.startswith("model.layers."):
            others[name] = tensor
            continue
        _, _, number, inner = name.split(".", 3)
        if inner in of_mixture:
            weights[f"blocks.{number}.mixture.{of_mixture[inner]}"] = tensor
        elif inner in of_attention:
            weights[f"blocks.{number}.{of_attention[inner]}"] = tensor
        else:
            others[name] = tensor
    return weights | from_llama(others, key_value_heads)
