import pytest
import torch

from ptdbench.models.llama import Llama, Rotary, turn
from tests.models.made import check_logits, filled
from tests.models.their_weights import from_llama


def scaled(theta, factor):
    """How transformers writes rotary frequencies down."""
    if factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **scaling}


@pytest.mark.parametrize(
    ("groups", "tie_weights", "theta", "factor"),
    [(2, False, 500000.0, 8.0), (2, True, 10000.0, 1.0), (4, False, 10000.0, 1.0), (1, False, 10000.0, 1.0)],
)
def test_llama_weights_give_the_logits_of_transformers(groups, tie_weights, theta, factor):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 4, "key_value_heads": groups, "width": 32, "hidden": 48, "vocabulary": 60}
    ours = filled(Llama, **sizes, tie_weights=tie_weights, rope_theta=theta, rope_factor=factor)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=groups, max_position_embeddings=16384, rms_norm_eps=1e-5,
        rope_parameters=scaled(theta, factor), tie_word_embeddings=tie_weights,
    )  # fmt: skip
    check_logits(ours, transformers.LlamaForCausalLM(config), lambda state: from_llama(state, groups))


@pytest.mark.parametrize(("theta", "factor"), [(10000.0, 1.0), (500000.0, 8.0), (500000.0, 32.0)])
def test_angles_are_those_of_transformers_far_from_the_beginning(theta, factor):
    rotary = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding
    transformers = pytest.importorskip("transformers")
    rope = {"max_position_embeddings": 16384, "rope_parameters": scaled(theta, factor)}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, **rope)
    positions = torch.tensor([0, 1, 100, 5000, 16383])
    angles = Rotary(128, theta, factor)(positions)
    cos, sin = rotary(config)(torch.zeros(1), positions[None])
    torch.testing.assert_close(angles.cos(), cos[0, :, :64], rtol=0, atol=1e-3)  # 1e-7 of 16383
    torch.testing.assert_close(angles.sin(), sin[0, :, :64], rtol=0, atol=1e-3)
    unscaled = Rotary(128, theta, 1.0)(positions)
    assert (angles[-1, -1] / unscaled[-1, -1]).item() == pytest.approx(1 / factor)
    assert angles[-1, 0] == unscaled[-1, 0]


def test_angles_are_fp32_where_the_arithmetic_is_not():
    """Position 1001 is no number of bf16."""
    angles = Rotary(8, 10000.0, 1.0)(torch.tensor([1000, 1001]))
    assert angles.dtype == torch.float32
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    turned = turn(x, angles)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), turn(x.float(), angles), rtol=1e-2, atol=1e-2)
    assert not torch.equal(turned[0], turned[1])
