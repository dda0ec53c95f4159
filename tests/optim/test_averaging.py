from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.optim.averaging import KEY, WeightAverage
from tests.optim.made_muon import muon_of
from tests.parallel.ranks import pretended

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    # the last linear layer's weight would be the head, and no matrix
    "muon": lambda model: muon_of(whole := nn.Sequential(model, nn.Linear(2, 1)))(whole.named_parameters()),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, after=lambda: None) -> None:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_average_equals_torchs(name):
    model, plain = linear(), linear()
    optimizer = OPTIMIZERS[name](model)
    average = WeightAverage(optimizer, 0.7)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    steps(model, optimizer, 5, lambda: reference.update_parameters(model))
    trained = model.weight.detach().clone()
    with torch.no_grad(), average.in_place():
        torch.testing.assert_close(model.weight, reference.module.weight)
        assert not torch.equal(model.weight, trained)
    assert torch.equal(model.weight, trained)
    steps(plain, OPTIMIZERS[name](plain), 5)
    assert torch.equal(plain.weight, trained)


def test_weights_return_after_a_failed_evaluation():
    model = linear()
    model.bias.requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](model)
    average = WeightAverage(optimizer, 0.9)
    steps(model, optimizer, 3)
    trained = model.weight.detach().clone()
    with pytest.raises(ValueError, match="judge"), torch.no_grad(), average.in_place():
        raise ValueError("judge")
    assert torch.equal(model.weight, trained)
    assert KEY in optimizer.state[model.weight]
    assert KEY not in optimizer.state[model.bias]


class NoDTensors(TorchDispatchMode):
    """Fails where an operation takes a DTensor, which costs the host more than the step of an optimizer."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(issubclass(kind, DTensor) for kind in types), operation
        return operation(*args, **(kwargs or {}))


def test_sharded_weights_average_locally():
    with pretended(2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight])
        WeightAverage(optimizer, 0.5)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        weight.grad = None
        with torch.no_grad():
            weight.fill_(3)
        with NoDTensors():
            optimizer.step()
        assert optimizer.state[weight][KEY].to_local().tolist() == [2, 2]
