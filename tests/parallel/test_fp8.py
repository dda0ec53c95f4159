"""Conversion to fp8, emulated: no CPU has such units."""

import copy

import pytest
import torch
from torch import nn

from ptdbench.models.gpt import GPT
from ptdbench.parallel import fp8
from ptdbench.parallel.precision import Copies, narrow

needs_torchao = pytest.mark.skipif(not fp8.is_installed(), reason="torchao is not installed")


@pytest.mark.parametrize(
    ("module", "suits"),
    [
        (nn.Linear(512, 1024), True),
        (nn.Linear(512, 1024, bias=False), True),
        (nn.Linear(496, 1024), False),  # small
        (nn.Linear(1024, 520), False),  # no multiple of 16
        (nn.Bilinear(512, 512, 1), False),
        (type("Other", (nn.Linear,), {})(512, 512), False),  # may compute something else
    ],
)
def test_which_layers_suit(module, suits):
    assert fp8.suits(module) == suits


@needs_torchao
def test_blocks_are_converted_and_embedding_and_head_are_not(monkeypatch):
    monkeypatch.setattr(fp8, "SMALLEST", 64)
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=64, sequence_length=16, vocabulary=128)
    wide, names = copy.deepcopy(model), list(model.state_dict())
    fp8.convert(model.layers(), emulate=True)
    converted = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    linear = ("attention.query_key_value", "attention.output", "mlp.up", "mlp.down")
    assert converted == [f"blocks.{block}.{name}" for block in range(2) for name in linear]
    assert list(model.state_dict()) == names
    assert model.head.projection.weight is model.embedding.token.weight

    tokens, targets = torch.randint(128, (2, 2, 16))
    losses = {}
    for name, one in (("fp8", model), ("bf16", copy.deepcopy(wide)), ("fp32", wide)):
        narrow(one, one.layers(), name)
        if name != "fp32":
            Copies(one, one.layers(), torch.bfloat16)
        loss = one(tokens, targets)
        loss.backward()
        losses[name] = loss.item()
        assert {weight.grad.dtype for weight in one.parameters()} == {torch.float32}
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp8"] != losses["bf16"]  # it is another arithmetic
    for got, want in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.cosine_similarity(got.grad.flatten(), want.grad.flatten(), dim=0) > 0.99


@needs_torchao
def test_a_converted_block_is_one_graph(monkeypatch):
    monkeypatch.setattr(fp8, "SMALLEST", 64)
    block = GPT(layers=1, heads=2, width=64, sequence_length=16, vocabulary=128).blocks[0]
    fp8.convert([block], emulate=True)
    narrow(block, [block], "fp8")
    inputs = torch.randn(2, 16, 64)
    compiled = torch.compile(block.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), block(inputs))
    torch._dynamo.reset()
