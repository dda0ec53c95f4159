"""What decoders of all kinds share."""

from types import SimpleNamespace

import pytest
import torch

from ptdbench.models import decoder
from ptdbench.models.decoder import CausalMix


def test_fewer_heads_of_keys_give_the_same_without_a_kernel_for_them(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, generator=generator) for heads in (6, 2, 2))
    expected = CausalMix()(q, k, v)
    monkeypatch.setattr(decoder, "_has_grouped_kernel", lambda q: False)
    torch.testing.assert_close(CausalMix()(q, k, v), expected)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "has"),
    [(True, torch.float32, False), (True, torch.bfloat16, True), (False, torch.float32, True)],
)
def test_of_the_kernels_of_a_gpu_only_flash_attention_takes_fewer_heads(is_cuda, dtype, has, monkeypatch):
    asked = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8))
    assert decoder._has_grouped_kernel(asked) == has
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7))  # has it not
    assert decoder._has_grouped_kernel(asked) == (not is_cuda)
