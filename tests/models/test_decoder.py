"""What decoders of all kinds share."""

from types import SimpleNamespace

import pytest
import torch

from ptdbench.models import decoder
from ptdbench.models.decoder import CausalMix
from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Rotary, rotate
from ptdbench.models.materialize import parameter_count
from tests.models.made import filled


def test_repeated_keys_equal_the_grouped_kernel(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, generator=generator) for heads in (6, 2, 2))
    expected = CausalMix()(q, k, v)
    monkeypatch.setattr(decoder, "_has_grouped_kernel", lambda q: False)
    torch.testing.assert_close(CausalMix()(q, k, v), expected)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "has"),
    [(True, torch.float32, False), (True, torch.bfloat16, True), (False, torch.float32, True)],
)
def test_grouped_kernel_by_device_and_dtype(is_cuda, dtype, has, monkeypatch):
    query = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8))
    assert decoder._has_grouped_kernel(query) == has
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7))  # has it not
    assert decoder._has_grouped_kernel(query) == (not is_cuda)


def test_tied_weight_has_both_gradients():
    sizes = {"layers": 2, "heads": 4, "width": 32, "sequence_length": 24, "vocabulary": 60}
    tied, untied = (filled(GPT, **sizes, tie_weights=tie_weights) for tie_weights in (True, False))
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


def test_rotary_angles_are_fp32():
    """Position 1001 is no number of bf16."""
    angles = Rotary(8, 10000.0, 1.0)(torch.tensor([1000, 1001]))
    assert angles.dtype == torch.float32
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    turned = rotate(x, angles)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rotate(x.float(), angles), rtol=1e-2, atol=1e-2)
    assert not torch.equal(turned[0], turned[1])
