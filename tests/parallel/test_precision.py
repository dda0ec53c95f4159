from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.local_part import local_part
from ptdbench.measure import hardware
from ptdbench.optim.averaging import WeightAverage
from ptdbench.parallel.precision import DTYPES, AgreedGradScaler, Copies, arithmetic, cast_inputs
from tests.models.assembled import assembled
from tests.parallel.ranks import each, on_ranks


@pytest.mark.parametrize(
    ("precision", "device", "on", "name"),
    [
        ("fp32", "cuda", False, "fp32"),
        ("tf32", "cuda", True, "tf32"),
        ("fp32", "cuda", True, "tf32"),  # not as asked for, but as it is
        ("fp32", "cpu", True, "fp32"),
        ("bf16", "cuda", True, "bf16"),
        ("fp16", "cuda", False, "fp16"),
    ],
)
def test_arithmetic_of_products(precision, device, on, name):
    with hardware.tf32_allowed(on):
        assert arithmetic(precision, device) == name


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


@pytest.mark.parametrize(("waits", "together"), [(False, [2, 2, 2]), (True, [1, 1, 1, 3])])
def test_step_casts_weights_once_and_gradients_together(waits, together):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    copies, casts = Copies(module, list(module)[:2], torch.bfloat16, vectors_wait=waits), []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "copy" in operation.__name__:
                casts.append(len(args[0]) if operation is torch.ops.aten._foreach_copy_.default else operation)
            return operation(*args, **(kwargs or {}))

    inputs = torch.rand(2, 4, dtype=torch.bfloat16)
    with Casts():
        copies.begin()
        assert casts == [6]
        for _ in range(2):  # micro-batches
            casts.clear()
            loss = module(inputs).sum()
            assert casts == []
            loss.backward()
            assert sorted(casts) == together
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


def remembers(self: Any, inputs: Any, targets: Any = None, **options: Any) -> Any:
    self.seen = {"inputs": inputs, "targets": targets, **options}
    return inputs


def test_inputs_are_cast_except_targets():
    module, floats = assembled(remembers), torch.ones(2)
    cast_inputs(module, [], "bf16")
    tokens = torch.ones(2, dtype=torch.int64)
    for by_place, by_name in (((floats,), {}), ((), {"targets": floats})):
        module((floats, [tokens]), *by_place, mask=floats, size=3, **by_name)
        (inputs, (kept,)), targets = module.seen["inputs"], module.seen["targets"]
        assert inputs.dtype == module.seen["mask"].dtype == torch.bfloat16
        assert targets is floats
        assert kept is tokens
        assert module.seen["size"] == 3


def test_layers_cast_fp32_inputs_and_batch_norms_and_buffers_stay():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *seen: seen[-1].float())
    cast_inputs(module, [module[1]], "bf16")
    Copies(module, [module[1]], torch.bfloat16)
    assert module(torch.ones(1, 2)).dtype == torch.bfloat16
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


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_fp32_tensors_leave_the_forward_alone(precision):
    layer = nn.Linear(4, 4)
    cast_inputs(layer, [layer], precision)
    assert "forward" not in vars(layer)
    assert type(layer) is nn.Linear


class AllReduces(TorchDispatchMode):
    """Counts them, those that torch takes for DTensors included."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until it is in operations of its parts
        self.count += "reduce" in str(operation)
        return operation(*args, **(kwargs or {}))


def overflow_on_one_rank(fused: bool, sharded: bool) -> dict[str, Any]:
    """Four steps, averaged: in the first and last, rank 1's gradient has overflowed.

    Rank 0 never scales a loss, as an early stage.
    """
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def placed(part: Tensor) -> Tensor:
        return DTensor.from_local(part, mesh, [Shard(0)]) if sharded else part

    weight = nn.Parameter(placed(torch.ones(3)))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    average = WeightAverage(optimizer, 0.5)
    scaler = AgreedGradScaler("cpu", enabled=True)
    seen: dict[str, Any] = {"scales": [scaler.get_scale()], "weights": [], "gradients": [], "messages": []}
    for overflows in (True, False, False, True):
        gradient = torch.full((3,), torch.inf if overflows and rank == 1 else scaler.get_scale())
        if rank == 1:
            scaler.scale(torch.ones(()))
        weight.grad = placed(gradient.clone())
        with AllReduces() as taken:
            scaler.step(optimizer)
            scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["weights"].append(local_part(weight.detach()).clone())
        seen["gradients"].append(gradient)
        seen["messages"].append(taken.count)
    with torch.no_grad(), average.in_place():
        return seen | {"average": local_part(weight).clone()}


@pytest.mark.ranks
def test_overflow_on_one_rank_skips_step_everywhere():
    first, other = on_ranks(2, each, overflow_on_one_rank, [(False, False), (True, False), (False, True), (True, True)])
    assert all(seen["gradients"][0].isfinite().all() for seen in first.values())
    assert all(seen["gradients"][0].isinf().all() for seen in other.values())
    for seen in (*first.values(), *other.values()):
        assert seen["scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**14]  # halved after the overflows
        assert torch.equal(seen["weights"][0], torch.ones(3))
        # The gradient is 1 once it is unscaled; Adam's first steps then have the length of the learning rate.
        torch.testing.assert_close(seen["weights"][1], torch.full((3,), 0.9))
        torch.testing.assert_close(seen["average"], torch.full((3,), 0.85))  # of the weights after these two steps
        assert seen["messages"] == [1] * 4
