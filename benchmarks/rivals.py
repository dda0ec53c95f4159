"""Models as others train them: they take tokens and targets and return a mean loss, with torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Returns the mean loss of ``inputs`` and ``targets``, each ``[batch, length]`` in int64.
Loss = Callable[[Tensor, Tensor], Tensor]


def transformers_gpt2(sizes: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """``GPT2LMHeadModel`` with SDPA and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes["vocabulary"],
        n_positions=sizes["sequence_length"],
        n_embd=sizes["width"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _with_sdpa(GPT2LMHeadModel, config)


def transformers_llama(sizes: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """``LlamaForCausalLM`` with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=sizes["sequence_length"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["key_value_heads"],
        tie_word_embeddings=sizes["tie_weights"],
        use_cache=False,
    )
    return _with_sdpa(LlamaForCausalLM, config)


def transformers_mixtral(sizes: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """``MixtralForCausalLM`` with SDPA, without an auxiliary loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=sizes["sequence_length"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["expert_hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["key_value_heads"],
        num_local_experts=sizes["experts"],
        num_experts_per_tok=sizes["active"],
        rms_norm_eps=sizes["norm_epsilon"],
        use_cache=False,
    )
    return _with_sdpa(MixtralForCausalLM, config)


def transformers(sizes: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """The model of ``transformers`` with these sizes: Mixtral has experts, and Llama fewer heads of keys and values."""
    if "experts" in sizes:
        return transformers_mixtral(sizes)
    return (transformers_llama if "key_value_heads" in sizes else transformers_gpt2)(sizes)


def _with_sdpa(kind: Callable[[Any], nn.Module], config: Any) -> tuple[nn.Module, Loss]:
    config._attn_implementation = "sdpa"
    model = kind(config)
    return model, lambda inputs, targets: model(input_ids=inputs, labels=inputs, shift_labels=targets).loss


def nanogpt(sizes: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """The recipe of nanoGPT (https://github.com/karpathy/nanoGPT): whole logits, exact GELU, tied weights, biases."""
    model = NanoGPT(**{name: sizes[name] for name in ("layers", "heads", "width", "sequence_length", "vocabulary")})
    return model, model


class NanoGPT(nn.Module):
    """Blocks between a tied embedding and head; its forward pass makes all logits and compares them in one go."""

    def __init__(self, layers: int, heads: int, width: int, sequence_length: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``[batch, length]`` twice to the mean loss."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


RIVALS = {"transformers": transformers, "nanogpt": nanogpt}
