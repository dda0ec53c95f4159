"""Gradients in fp32 of modules that compute in bf16. A bf16 number has 8 bits: 257 would be rounded to 256."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ptdbench.kernels import wide_gradients
from ptdbench.kernels.copies import Copies
from ptdbench.kernels.wide_gradients import enable_wide_gradients

ROWS = 257


def laid_out(module: nn.Module) -> nn.Module:
    enable_wide_gradients(module)
    Copies(module, [], torch.bfloat16)
    return module


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)])
def test_a_linear_layer_computes_what_torch_does(shape, bias):
    layer, x = nn.Linear(4, 5, bias=bias), torch.randn(*shape).bfloat16().requires_grad_()
    copies = [weight.detach().bfloat16().requires_grad_() for weight in layer.parameters()]
    expected = F.linear(x, *copies)
    of_x, *of_weights = torch.autograd.grad(expected.sum(), [x, *copies])
    masters = list(layer.parameters())
    outputs = laid_out(layer)(x)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    assert torch.equal(x.grad, of_x)
    for master, gradient in zip(masters, of_weights, strict=True):
        assert master.grad.dtype == torch.float32
        assert torch.equal(master.grad, gradient.float())  # of few rows, so that nothing is rounded


def test_linear_gradients_are_unrounded(monkeypatch):
    # As a GPU has.
    monkeypatch.setattr(wide_gradients, "product", lambda left, right, dtype: left.to(dtype) @ right.to(dtype))
    layer = nn.Linear(2, 2)
    weight, bias = layer.parameters()
    laid_out(layer)(ones(ROWS, 2)).sum().backward()
    assert weight.grad.unique().item() == bias.grad.unique().item() == ROWS


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, nn.RMSNorm])
def test_weight_read_outside_its_layer_adds_gradients(kind):
    layer = kind(2, 2) if kind is nn.Linear else kind(2)
    weight = layer.weight
    laid_out(layer)
    x = torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16)
    layer(x).sum().backward()
    alone, weight.grad = weight.grad, None
    layer.register_forward_hook(lambda module, _, outputs: outputs + module.weight.sum())
    layer(x).sum().backward()
    assert torch.equal(weight.grad, alone + 2)  # two outputs, each with each weight


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weight_norm_stays_as_it_is():
    layer = nn.utils.weight_norm(nn.Linear(2, 2))
    laid_out(nn.Sequential(layer))(ones(3, 2)).sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())


def test_layers_work_under_autocast_frozen_and_without_copies():
    layer = laid_out(nn.Linear(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(3, 2)).sum().backward()
    assert layer._parameters["weight"].grad.unique().item() == 3
    layer = nn.Linear(2, 2)
    weight, bias = layer.parameters()
    weight.requires_grad_(False)
    laid_out(layer)(ones(3, 2)).sum().backward()
    assert weight.grad is None
    assert bias.grad.tolist() == [3, 3]
    layer = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.RMSNorm(2))
    expected = layer(torch.arange(3))
    enable_wide_gradients(layer)
    assert torch.equal(layer(torch.arange(3)), expected)


def test_embedding_rows_are_summed_unrounded():
    layer, tokens = nn.Embedding(3, 2, padding_idx=0), torch.tensor([[1] * ROWS + [2], [0] * (ROWS + 1)])
    (weight,) = layer.parameters()
    expected = weight.detach().bfloat16()[tokens]
    outputs = laid_out(layer)(tokens)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    assert weight.grad.tolist() == [[0, 0], [ROWS, ROWS], [1, 1]]


def test_only_plain_layers_are_replaced(monkeypatch):
    class Other(nn.Linear):
        pass

    class Divided(nn.Parameter):
        pass

    monkeypatch.setattr(wide_gradients, "DTensor", Divided)
    module = nn.ModuleList([Other(1, 1), *(nn.Linear(1, 1) for _ in range(3))])
    module[1].forward = nn.Identity().forward
    module[2].weight = Divided(torch.ones(1, 1))
    enable_wide_gradients(module)
    assert [type(part) for part in module] == [Other, nn.Linear, nn.Linear, wide_gradients.Linear]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1, 2)
        self.norm, self.linear, self.root = nn.LayerNorm(2), nn.Linear(2, 2), nn.RMSNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.root(self.linear(self.norm(x + self.rows(torch.zeros(len(x), dtype=torch.int64)))))


def test_compiled_blocks_share_a_graph_with_wide_gradients():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def compile_each(*parts: nn.Module) -> None:
        for part in parts:
            part.forward = torch.compile(part.forward, backend=counter, fullgraph=True, dynamic=False)

    module = nn.Sequential(Block(), Block())
    named = dict(module.named_parameters())
    enable_wide_gradients(module)
    compile_each(*module)
    Copies(module, list(module), torch.bfloat16)
    x = torch.arange(2 * ROWS).view(ROWS, 2).bfloat16().requires_grad_()
    (outputs := module(x)).backward(torch.ones_like(outputs))
    assert counter.frame_count == 1
    assert {weight.grad.dtype for weight in named.values()} == {torch.float32}
    vectors = [weight.grad for weight in named.values() if weight.dim() == 1]
    assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in vectors)
    norm = nn.LayerNorm(2)
    weight, bias = norm.parameters()
    enable_wide_gradients(norm)
    compile_each(norm)
    Copies(norm, [], torch.bfloat16)
    norm(torch.tensor([[1.0, -1.0]]).bfloat16().expand(ROWS, 2)).sum().backward()
    assert bias.grad.tolist() == [ROWS, ROWS]
    assert weight.grad.tolist() == pytest.approx([ROWS, -ROWS], rel=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize("gathered", [False, True])
def test_compiled_norm_is_computed_again_from_its_input(gathered):
    torch.compiler.reset()
    module = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    enable_wide_gradients(module, gathered=gathered)
    module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    if gathered:
        module.bfloat16()  # as FSDP gathers them
    else:
        Copies(module, [], torch.bfloat16)
    saved = []
    x = torch.arange(2 * ROWS).view(ROWS, 2).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        outputs = module(x)
    assert [tensor.dtype for tensor in saved if tensor.numel() == x.numel()] == [torch.bfloat16]
    outputs.sum().backward()
    torch.compiler.reset()
