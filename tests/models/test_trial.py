"""Trial passes: what they find of a module's forward pass, and that they leave the module as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.foreign import adapt
from ptdbench.models.state import observe, trial
from tests.models.assembled import assembled


def example() -> tuple[Tensor, Tensor]:
    return torch.empty(1, 3, device="meta"), torch.empty(1, 3, device="meta")


def momentum(follow: Callable[[Tensor, Tensor], object]) -> nn.Module:
    """Changes a frozen weight by a trained one in training, and the statistics of a batch norm."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                follow(self.slow.weight, self.fast.weight)
        return self.norm(self.fast(inputs)) + self.slow(inputs)

    slow = nn.Linear(3, 3).requires_grad_(False)
    return assembled(forward, fast=nn.Linear(3, 3), slow=slow, norm=nn.BatchNorm1d(3))


def replace(slow: Tensor, fast: Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


def if_finite(follow: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], object]:
    """By a value, which the meta device has not."""
    return lambda slow, fast: follow(slow, fast) if fast.isfinite().all() else None


@pytest.mark.parametrize(
    ("follow", "is_told"),
    {
        "reads": (lambda slow, fast: slow + fast, False),
        "in place": (in_place := lambda slow, fast: slow.lerp_(fast, 0.1), True),
        "data": (lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1), True),
        "other data": (replace, True),
        "several": (lambda slow, fast: torch._foreach_lerp_([slow], [fast], 0.1), True),
        "out": (lambda slow, fast: torch.add(slow, fast, out=slow), True),
        "a row": (lambda slow, fast: slow[0].copy_(fast[0]), True),
        "by value": (if_finite(in_place), True),
        "other data, by value": (if_finite(replace), True),
    }.values(),
)
def test_changed_weights_are_observed_and_restored(follow, is_told):
    module = momentum(follow).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    observed = observe(adapt(module, example), [], *example())
    assert observed.weights == ["module.slow.weight"] * is_told
    assert observed.buffers == []  # the statistics of a batch norm
    assert not module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("count", [
    lambda module: module.steps.add_(1),
    lambda module: setattr(module, "steps", module.steps + 1),
    lambda module: module.steps.add_(1) if module.steps.item() >= 0 else None,
])  # fmt: skip
def test_changed_buffers_are_observed_and_restored(count):
    module = nn.Linear(3, 3)
    module.register_buffer("steps", steps := torch.zeros(()))
    module.register_forward_pre_hook(lambda module, inputs: (inputs, module.training and count(module))[0])
    observed = observe(adapt(module, example), [], *example())
    assert (observed.weights, observed.buffers) == ([], ["module.steps"])
    assert module.steps is steps
    assert steps == 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)

    encode = forward

    def run(self, hidden: Tensor) -> Tensor:
        return self(hidden)


def stack(method: str, more: Callable[[Any], Any] = lambda blocks: 0) -> nn.Module:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        for block in self.blocks[:2]:  # the last one may be for other steps
            hidden = getattr(block, method)(hidden)
        return hidden + more(self.blocks)

    return assembled(forward, blocks=nn.ModuleList(Block() for _ in range(3)))


@pytest.mark.parametrize(("method", "bypassed"), [("__call__", 0), ("run", 0), ("encode", 2), ("forward", 2)])
def test_bypassed_layers_are_observed(method, bypassed):
    model = adapt(stack(method), example)
    names = [f"module.blocks.{number}.linear.{weight}" for number in range(bypassed) for weight in ("weight", "bias")]
    observed = observe(model, model.layers(), *example())
    assert (observed.bypassed, observed.outside) == (names, names)


def test_weight_read_outside_its_layer_is_observed():
    model = adapt(stack("__call__", lambda blocks: blocks[1].linear.weight.square().sum()), example)
    observed = observe(model, model.layers(), *example())
    assert (observed.bypassed, observed.outside) == ([], ["module.blocks.1.linear.weight"])


def test_trial_undoes_writes_to_weights():
    class Merging(nn.Linear):
        """Adds to its weight in eval mode, as adapters do that are merged there."""

        merged = False

        def train(self, mode: bool = True) -> nn.Module:
            with torch.no_grad():
                self.weight += int(self.merged and mode) * -1.0 + int(not mode)
            self.merged = not mode
            return super().train(mode)

    module = Merging(3, 3)
    before = module.weight.clone()
    with trial(module):
        assert not module.training
        assert not torch.equal(module.weight, before)
    assert torch.equal(module.weight, before)
    assert (module.merged, module.training) == (False, True)
