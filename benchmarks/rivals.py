"""Models as others train them: they take tokens and targets and return a mean loss, with torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Returns the mean loss of ``inputs`` and ``targets``, each ``[batch, length]`` in int64.
Loss = Callable[[Tensor, Tensor], Tensor]

#: How our sizes are called there; GPT-2 has other names for the same.
_COMMON = {
    "vocabulary": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
_LLAMA = {
    **_COMMON, "hidden": "intermediate_size", "key_value_heads": "num_key_value_heads",
    "tie_weights": "tie_word_embeddings",
}  # fmt: skip
_MIXTRAL = {
    **_COMMON, "expert_hidden": "intermediate_size", "key_value_heads": "num_key_value_heads",
    "experts": "num_local_experts", "active": "num_experts_per_tok", "norm_epsilon": "rms_norm_eps",
}  # fmt: skip


def transformers(sizes: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """The model of ``transformers`` with these sizes, with SDPA, and without dropout and auxiliary losses.

    Mixtral has experts, and Llama fewer heads of keys and values than GPT-2.
    """
    import transformers as theirs

    kind: Any
    options: dict[str, Any] = {"use_cache": False}
    if "experts" in sizes:
        kind, names = theirs.MixtralForCausalLM, _MIXTRAL
    elif "key_value_heads" in sizes:
        kind, names = theirs.LlamaForCausalLM, _LLAMA
    else:
        kind, names = theirs.GPT2LMHeadModel, _COMMON
        options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = kind.config_class(**{name: sizes[own] for own, name in names.items()}, **options)
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
