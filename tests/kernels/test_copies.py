from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.kernels import copies
from ptdbench.kernels.copies import Copies, enable_wide_gradients
from ptdbench.parallel.precision import DTYPES, cast_inputs
from tests.models.assembled import assembled


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_module_computes_with_copies(precision, dtype):
    layer = nn.Linear(4, 4)
    state, masters = layer.state_dict(), list(layer.parameters())
    cast_inputs(layer, [], precision)
    Copies(layer, [], DTYPES[precision])
    inputs = torch.rand(2, 4)
    outputs = layer(inputs)
    assert layer.weight.dtype == layer.bias.dtype == outputs.dtype == dtype
    torch.testing.assert_close(outputs, F.linear(inputs.to(dtype), state["weight"].to(dtype), state["bias"].to(dtype)))
    outputs.float().sum().backward()
    assert all(weight is master for weight, master in zip(layer.parameters(), masters, strict=True))
    assert {weight.dtype for weight in masters} == {weight.grad.dtype for weight in masters} == {torch.float32}
    assert list(layer.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


def test_a_new_value_of_a_weight_counts_at_once():
    layer = nn.Linear(1, 1, bias=False)
    cast_inputs(layer, [], "bf16")
    Copies(layer, [], torch.bfloat16)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.fill_(3)
    assert layer(torch.ones(1, 1)).item() == 3
    layer.weight = nn.Parameter(torch.full((1, 1), 5.0))
    assert layer(torch.ones(1, 1)).item() == 5


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize(("waits", "together"), [(False, [2, 2, 2]), (True, [1, 1, 1, 3])])
def test_step_casts_weights_once_and_gradients_together(waits, together, is_distributed, alone):
    module, inputs = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.rand(2, 4, dtype=torch.bfloat16)
    if is_distributed:
        mesh = init_device_mesh("cpu", (1,))
        module, inputs = distribute_module(module, mesh), distribute_tensor(inputs, mesh)
    copies, casts = Copies(module, list(module)[:2], torch.bfloat16, vectors_wait=waits), []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "copy" in operation.__name__:
                casts.append(len(args[0]) if operation is torch.ops.aten._foreach_copy_.default else operation)
            return operation(*args, **(kwargs or {}))

    with Casts():
        copies.begin()
        assert casts == [6]
        for _ in range(2):  # micro-batches
            casts.clear()
            loss = module(inputs).sum()
            assert casts == []
            loss.backward()
            assert sorted(casts) == together
        assert {type(weight.grad) for weight in module.parameters()} == {DTensor if is_distributed else Tensor}
        assert {weight.grad.dtype for weight in module.parameters()} == {torch.float32}
        copies.end()
        casts.clear()
        with torch.no_grad():
            module(inputs)
        assert casts == [6]


def beside() -> Any:
    """Reads a weight before its unit has run, and one of a unit that never runs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(self.inner(x * self.inner.weight.sum()), self.head.weight)

    inner, head = (nn.Linear(2, 2, bias=False) for _ in range(2))
    nn.init.ones_(inner.weight), nn.init.ones_(head.weight)
    return assembled(forward, inner=inner, head=head)


def test_weight_read_outside_its_unit_gets_gradients():
    module = beside()
    Copies(module, [module.inner, module.head], torch.bfloat16)
    inputs = torch.ones(1, 2, dtype=torch.bfloat16)
    for _ in range(2):
        module.zero_grad()
        module(inputs).sum().backward()
        # The loss is 2 s times the sum of inner's weights, and s is that sum, 4; its outputs are 8.
        assert [weight.grad.unique().tolist() for weight in module.parameters()] == [[16], [8]]
        with torch.no_grad():
            module(inputs)


def test_parameters_return_after_a_step():
    module = beside()
    copies = Copies(module, [module.inner], torch.bfloat16)
    copies.begin()
    module(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    copies.end()
    assert module.inner.weight is module.inner._parameters["weight"]
    assert set(map(type, deepcopy(module.inner).parameters())) == {nn.Parameter}


def test_gradients_accumulate_in_fp32():
    """256 and 1: in bf16 their sum would be 256."""
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    (weight,) = first.parameters()
    second.weight = weight
    module = nn.ModuleList([first, second])
    Copies(module, list(module), torch.bfloat16)
    large, small = (torch.full((1, 1), size, dtype=torch.bfloat16) for size in (256, 1))
    (first(large) + second(small)).sum().backward()
    assert weight.grad.item() == 257
    first(large).sum().backward()
    assert weight.grad.item() == 513


def test_a_frozen_weight_gets_no_gradient():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    Copies(layer, [], torch.bfloat16)
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert not layer.weight.requires_grad
    assert layer._parameters["weight"].grad is None
    assert layer._parameters["bias"].grad.tolist() == [1, 1]


def test_layers_cast_fp32_inputs():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *seen: seen[-1].float())
    cast_inputs(module, [module[1]], "bf16")
    Copies(module, [module[1]], torch.bfloat16)
    assert module(torch.ones(1, 2)).dtype == torch.bfloat16


def test_batch_norms_and_buffers_stay_fp32():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    cast_inputs(module, [], "bf16")
    Copies(module, [], torch.bfloat16)
    assert module(torch.rand(3, 3, 3, 3)).dtype == torch.bfloat16
    assert module[1].weight.dtype == module[1].running_mean.dtype == torch.float32
    assert module[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "made", "taken"),
    [(nn.LSTM, (4, 4), 1), (nn.GRU, (4, 4), 1), (nn.MultiheadAttention, (4, 2), 3), (nn.Bilinear, (4, 4, 2), 2),
     (nn.PReLU, (), 1)],
)  # fmt: skip
def test_copies_under_special_modules(kind, made, taken):
    module, inputs = kind(*made), [torch.linspace(-1, 1, 12).view(1, 3, 4)] * taken

    def called() -> Tensor:
        outputs = module(*inputs)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    expected = called()
    cast_inputs(module, [], "bf16")
    Copies(module, [], torch.bfloat16)
    assert called().dtype == torch.bfloat16
    torch.testing.assert_close(called().float(), expected, rtol=0.05, atol=0.02)


#: A bf16 number has 8 bits: 257 would be rounded to 256.
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
    monkeypatch.setattr(copies, "product", lambda left, right, dtype: left.to(dtype) @ right.to(dtype))
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

    monkeypatch.setattr(copies, "DTensor", Divided)
    module = nn.ModuleList([Other(1, 1), *(nn.Linear(1, 1) for _ in range(3))])
    module[1].forward = nn.Identity().forward
    module[2].weight = Divided(torch.ones(1, 1))
    enable_wide_gradients(module)
    assert [type(part) for part in module] == [Other, nn.Linear, nn.Linear, copies.Linear]


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
