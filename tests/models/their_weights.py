"""The weights of Hugging Face's decoders under the names of ours."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

NAMES = {
    # GPT-2
    "transformer.wte": "embedding.token",
    "transformer.wpe": "embedding.position",
    "transformer.ln_f": "head.norm",
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.output",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    # Llama
    "model.embed_tokens": "embedding.token",
    "model.norm": "head.norm",
    "input_layernorm": "attention_norm",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "lm_head": "head.projection",
    # Mixtral and Qwen3-MoE
    "self_attn.q_norm": "attention.norms.0",
    "self_attn.k_norm": "attention.norms.1",
    "mlp.gate": "mixture.router",
    "mlp.experts": "mixture.experts",
}


def _renamed(name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` becomes ``blocks.0.mlp.up.weight``; KeyError where ours has no such."""
    if of_block := re.fullmatch(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.+)", name):
        return f"blocks.{of_block[1]}.{_renamed(of_block[2])}"
    module, _, kind = name.rpartition(".")
    return f"{NAMES[module]}.{kind.removesuffix('_proj')}"


def from_gpt2(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Of a ``GPT2LMHeadModel``, whose linear layers are ``[inputs, outputs]``, and fused by kind and not by head."""
    weights = {}
    for name, tensor in state.items():
        turned = tensor.t() if ".c_" in name and tensor.dim() == 2 else tensor
        by_head = turned.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2) if ".c_attn" in name else turned
        weights[_renamed(name)] = by_head
    return weights


def from_llama(state: Mapping[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Of a ``LlamaForCausalLM``, and of decoders with experts that are named alike, with so many groups of heads."""
    weights = {}
    for name, tensor in state.items():
        before, is_query, _ = name.partition("q_proj")
        if is_query:  # the three matrices of a block become one, group by group
            three = [state[f"{before}{one}_proj.weight"].unflatten(0, (groups, -1)) for one in "qkv"]
            weights[_renamed(f"{before}qkv_proj.weight")] = torch.cat(three, dim=1).flatten(0, 1)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[_renamed(name)] = tensor
    return weights
