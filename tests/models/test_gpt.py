import math

import pytest
import torch

from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import materialize, parameter_count
from ptdbench.problems import ConfigError
from tests.models.gpt2_weights import from_gpt2

SIZES = {"layers": 2, "heads": 4, "width": 32, "sequence_length": 24, "vocabulary": 60}


def gpt(**options):
    with torch.device("meta"):
        model = GPT(**SIZES | options)
    materialize(model, model, device="cpu", seed=0)
    return model


@pytest.mark.parametrize("tie_weights", [True, False])
def test_gpt2_weights_give_the_logits_of_transformers(tie_weights):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=24, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tie_weights
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # at the initial values biases and norms would hide mistakes
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = gpt(tie_weights=tie_weights)
    ours.load_state_dict(from_gpt2(theirs.state_dict(), heads=4))
    tokens = torch.randint(60, (3, 24))
    expected = theirs(tokens).logits
    error = (ours(tokens) - expected).abs().max() / expected.abs().max()
    assert expected.std() > 0.1
    assert error < 1e-5


def test_gpt2_weights_may_hold_masks_but_nothing_unknown():
    masks = {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    assert from_gpt2(masks, heads=4) == {}
    with pytest.raises(KeyError):
        from_gpt2({"transformer.h.0.attn.c_other.weight": torch.ones(1)}, heads=4)


def test_a_shorter_sequence_is_the_start_of_a_longer_one():
    model, tokens = gpt(), torch.randint(60, (2, 24))
    torch.testing.assert_close(model(tokens[:, :7]), model(tokens)[:, :7], rtol=1e-5, atol=1e-6)


def test_the_tied_weight_is_one_parameter_with_both_gradients():
    tied, untied = gpt(), gpt(tie_weights=False)
    untied.load_state_dict(tied.state_dict())
    tokens, targets = torch.randint(60, (2, 2, 24))
    for model in (tied, untied):
        model(tokens, targets).backward()
    assert tied.head.projection.weight is tied.embedding.token.weight
    assert tied.tied() == [("embedding.token.weight", "head.projection.weight")]
    assert untied.tied() == []
    both = untied.embedding.token.weight.grad + untied.head.projection.weight.grad
    torch.testing.assert_close(tied.embedding.token.weight.grad, both)
    assert parameter_count(untied) - parameter_count(tied) == 60 * 32


def test_initial_values_are_those_of_gpt2():
    model = gpt(layers=8, width=256, vocabulary=1000)
    residual = ("attention.output.weight", "mlp.down.weight")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            std = 0.02 / 4 if name.endswith(residual) else 0.02  # √(2 · 8) = 4
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * std, name
    tokens, targets = torch.randint(1000, (2, 4, 24))
    assert model(tokens, targets).item() == pytest.approx(math.log(1000), rel=0.02)


def test_flops_by_hand():
    """Per token 24 · 32² + 4 · 24 · 32 = 27648 a block and 2 · 32 · 60 = 3840 in the head, times 3 · 24."""
    flops = gpt().train_flops()
    assert flops == {"embedding": 0, "blocks.0": 1990656, "blocks.1": 1990656, "head": 276480}


def test_causal_attention_is_half_of_it():
    """As MaxText counts a token: 6 FLOPs for each weight of a product, and 6 · layers · width · length."""
    model = gpt()
    weights = sum(linear.weight.numel() for linear in model.modules() if isinstance(linear, torch.nn.Linear))
    causal = sum(model.train_flops().values()) - model.masked_flops()
    assert causal == 24 * (6 * weights + 6 * 2 * 32 * 24)


def test_all_problems_of_the_options_come_at_once_and_each_once():
    with pytest.raises(ConfigError) as error:
        GPT(layers=0, heads=5, width=32, sequence_length="long", vocabulary=1)
    assert str(error.value).splitlines() == [
        "layers=0: must be a whole number of at least 1",
        "sequence_length=long: must be a whole number of at least 1",
        "vocabulary=1: must be a whole number of at least 2",
        "heads=5: must divide width=32; try 2, 4, 8",
    ]
    with pytest.raises(ConfigError) as error:
        GPT(layers=1, heads=0, width=32)
    assert [problem.option for problem in error.value.problems] == ["heads"]
