import pytest
import torch

from ptdbench.models.llama import Llama, Rotary, turn
from ptdbench.models.materialize import materialize, parameter_count
from tests.models.their_weights import from_llama

SIZES = {
    "layers": 2, "heads": 4, "key_value_heads": 2, "width": 32, "hidden": 48, "sequence_length": 24, "vocabulary": 60,
}  # fmt: skip


def llama(**options):
    with torch.device("meta"):
        model = Llama(**SIZES | options)
    materialize(model, model, device="cpu", seed=0)
    return model


def scaled(theta, factor):
    """How transformers writes rotary frequencies down."""
    if factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **scaling}


@pytest.mark.parametrize(
    ("options", "theta", "factor"),
    [({}, 500000.0, 8.0), ({"tie_weights": True}, 10000.0, 1.0), ({"key_value_heads": 4}, 10000.0, 1.0),
     ({"key_value_heads": 1}, 10000.0, 1.0)],
)  # fmt: skip
def test_llama_weights_give_the_logits_of_transformers(options, theta, factor):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = llama(rope_theta=theta, rope_factor=factor, **options)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=ours.groups[0], max_position_embeddings=16384, rms_norm_eps=1e-5,
        rope_parameters=scaled(theta, factor), tie_word_embeddings=ours.tie_weights,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # at the initial values norms would hide mistakes
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours.load_state_dict(from_llama(theirs.state_dict(), ours.groups[0]))
    tokens = torch.randint(60, (3, 24))
    expected = theirs(tokens).logits
    assert expected.std() > 0.1
    assert (ours(tokens) - expected).abs().max() / expected.abs().max() < 1e-5
    assert parameter_count(ours) == sum(parameter.numel() for parameter in theirs.parameters())


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
