"""Decoders against those of Hugging Face: with their weights they have their logits."""

import re

import pytest
import torch

from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Llama, Rotary
from ptdbench.models.materialize import parameter_count
from ptdbench.models.moe import MoE
from tests.models.made import filled

SIZES = {"layers": 2, "heads": 4, "width": 32, "sequence_length": 24, "vocabulary": 60}
#: What transformers calls the same.
OF_GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "vocab_size": 60}
OF_LLAMA = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 60, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
}  # fmt: skip

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


def renamed(name):
    """``model.layers.0.mlp.up_proj.weight`` becomes ``blocks.0.mlp.up.weight``; KeyError where ours has no such."""
    if of_block := re.fullmatch(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.+)", name):
        return f"blocks.{of_block[1]}.{renamed(of_block[2])}"
    module, _, kind = name.rpartition(".")
    return f"{NAMES[module]}.{kind.removesuffix('_proj')}"


def from_gpt2(state, heads):
    """Of a ``GPT2LMHeadModel``, whose linear layers are ``[inputs, outputs]``, and fused by kind and not by head."""
    weights = {}
    for name, tensor in state.items():
        turned = tensor.t() if ".c_" in name and tensor.dim() == 2 else tensor
        by_head = turned.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2) if ".c_attn" in name else turned
        weights[renamed(name)] = by_head
    return weights


def from_llama(state, groups):
    """Of a ``LlamaForCausalLM``, and of decoders with experts that are named alike, with so many groups of heads."""
    weights = {}
    for name, tensor in state.items():
        before, is_query, _ = name.partition("q_proj")
        if is_query:  # the three matrices of a block become one, group by group
            three = [state[f"{before}{letter}_proj.weight"].unflatten(0, (groups, -1)) for letter in "qkv"]
            weights[renamed(f"{before}qkv_proj.weight")] = torch.cat(three, dim=1).flatten(0, 1)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[renamed(name)] = tensor
    return weights


def rope(theta, factor=1.0):
    """How transformers writes rotary frequencies down."""
    if factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **scaling}


def gpt2(tied):
    return GPT, {"tie_weights": tied}, "GPT2", {**OF_GPT2, "tie_word_embeddings": tied}


def llama(groups, tied=False, theta=10000.0, factor=1.0):
    ours = {"key_value_heads": groups, "hidden": 48, "tie_weights": tied, "rope_theta": theta, "rope_factor": factor}
    theirs = {"num_key_value_heads": groups, "intermediate_size": 48, "tie_word_embeddings": tied}
    return Llama, ours, "Llama", {**OF_LLAMA, **theirs, "rope_parameters": rope(theta, factor)}


def experts(kind, ours, theirs):
    ours = {"key_value_heads": 2, "experts": 6, "active": 2, "expert_hidden": 24, "rope_theta": 1e6, **ours}
    theirs = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "rope_parameters": rope(1e6), **theirs}
    return MoE, ours, kind, {**OF_LLAMA, **theirs}


@pytest.mark.parametrize(("family", "options", "kind", "config"), [
    gpt2(tied=True),
    gpt2(tied=False),
    llama(groups=2, theta=500000.0, factor=8.0),
    llama(groups=2, tied=True),
    llama(groups=4),
    llama(groups=1),
    experts("Mixtral", {}, {"intermediate_size": 24, "num_local_experts": 6}),
    experts(
        "Qwen3Moe",
        {"head_width": 12, "head_norm": True, "router": {"normalize": False}},
        {"moe_intermediate_size": 24, "num_experts": 6, "head_dim": 12, "norm_topk_prob": False},
    ),
])  # fmt: skip
def test_logits_equal_transformers(family, options, kind, config):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    of_kind = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    ours, theirs = filled(family, **SIZES, **options), of_kind(getattr(transformers, f"{kind}Config")(**config))
    with torch.no_grad():
        for parameter in theirs.parameters():  # at the initial values biases and norms would hide mistakes
            parameter.add_(0.2 * torch.randn_like(parameter))
    state = theirs.state_dict()
    weights = from_gpt2(state, heads=4) if family is GPT else from_llama(state, config["num_key_value_heads"])
    if family is MoE:
        weights = {name.replace("mlp_norm", "mixture.norm"): tensor for name, tensor in weights.items()}
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not [name for name in missing if not name.endswith(("router.load", "router.bias"))]
    assert not unexpected
    tokens = torch.randint(60, (3, 20))
    expected = theirs.eval()(tokens).logits
    assert expected.std() > 0.1
    assert (ours(tokens) - expected).abs().max() / expected.abs().max() < 1e-5
    assert parameter_count(ours) == parameter_count(theirs)


@pytest.mark.parametrize(("theta", "factor"), [(10000.0, 1.0), (500000.0, 8.0), (500000.0, 32.0)])
def test_rotary_angles_equal_transformers(theta, factor):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 16384}
    rotary = modeling.LlamaRotaryEmbedding(modeling.LlamaConfig(**sizes, rope_parameters=rope(theta, factor)))
    positions = torch.tensor([0, 1, 100, 5000, 16383])
    angles = Rotary(128, theta, factor)(positions)
    cos, sin = rotary(torch.zeros(1), positions[None])
    torch.testing.assert_close(angles.cos(), cos[0, :, :64], rtol=0, atol=1e-3)  # 1e-7 of 16383
    torch.testing.assert_close(angles.sin(), sin[0, :, :64], rtol=0, atol=1e-3)
    unscaled = Rotary(128, theta, 1.0)(positions)
    assert (angles[-1, -1] / unscaled[-1, -1]).item() == pytest.approx(1 / factor)
    assert angles[-1, 0] == unscaled[-1, 0]
