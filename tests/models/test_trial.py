"""Trial passes: what they find of a module's forward pass, and that they leave the module as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.foreign import adapt
from ptdbench.models.trial import observe, trial


def example() -> tuple[Tensor, Tensor]:
    return torch.empty(1, 3, device="meta"), torch.empty(1, 3, device="meta")


class Momentum(nn.Module):
    """Changes a frozen weight by a trained one in training, and the statistics of a batch norm."""

    def __init__(self, follow: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.follow = follow
        self.fast, self.slow = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.follow(self.slow.weight, self.fast.weight)
        return self.norm(self.fast(inputs)) + self.slow(inputs)


def replace(slow: Tensor, fast: Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


def follow_if_finite(slow: Tensor, fast: Tensor) -> None:
    if fast.isfinite().all():  # a value, which the meta device has not
        slow.lerp_(fast, 0.1)


def replace_if_finite(slow: Tensor, fast: Tensor) -> None:
    if fast.isfinite().all():
        replace(slow, fast)


@pytest.mark.parametrize(
    ("follow", "is_told"),
    {
        "reads": (lambda slow, fast: slow + fast, False),
        "in place": (lambda slow, fast: slow.lerp_(fast, 0.1), True),
        "data": (lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1), True),
        "other data": (replace, True),
        "several": (lambda slow, fast: torch._foreach_lerp_([slow], [fast], 0.1), True),
        "out": (lambda slow, fast: torch.add(slow, fast, out=slow), True),
        "a row": (lambda slow, fast: slow[0].copy_(fast[0]), True),
        "by value": (follow_if_finite, True),
        "other data, by value": (replace_if_finite, True),
    }.values(),
)
def test_a_weight_that_the_forward_pass_changes_is_named_and_stays_as_it_is(follow, is_told):
    module = Momentum(follow).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    observed = observe(adapt(module, example), [], *example())
    assert observed.weights == ["module.slow.weight"] * is_told
    assert observed.buffers == []  # the statistics of a batch norm
    assert not module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def count_in_place(module: nn.Module) -> None:
    module.steps += 1


def count_anew(module: nn.Module) -> None:
    module.steps = module.steps + 1


def count_by_value(module: nn.Module) -> None:
    if module.steps.item() >= 0:
        module.steps += 1


@pytest.mark.parametrize("count", [count_in_place, count_anew, count_by_value])
def test_a_buffer_that_the_forward_pass_changes_is_named_and_stays_as_it_is(count):
    module = nn.Linear(3, 3)
    module.register_buffer("steps", steps := torch.zeros(()))
    module.register_forward_pre_hook(lambda module, _: count(module) if module.training else None)
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

    def run(self, hidden: Tensor) -> Tensor:
        return self(hidden)

    def encode(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)


class Stack(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.method = method

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks[:2]:  # the last one may be for other steps
            hidden = getattr(block, self.method)(hidden)
        return hidden


@pytest.mark.parametrize(("method", "bypassed"), [("__call__", 0), ("run", 0), ("encode", 2), ("forward", 2)])
def test_weights_of_layers_that_are_not_called_are_named(method, bypassed):
    model = adapt(Stack(method), example)
    names = [f"module.blocks.{number}.linear.{weight}" for number in range(bypassed) for weight in ("weight", "bias")]
    observed = observe(model, model.layers(), *example())
    assert (observed.bypassed, observed.outside) == (names, names)


def test_a_weight_that_is_read_outside_of_its_layer_is_named():
    class Regularized(Stack):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) + self.blocks[1].linear.weight.square().sum()

    model = adapt(Regularized("__call__"), example)
    observed = observe(model, model.layers(), *example())
    assert (observed.bypassed, observed.outside) == ([], ["module.blocks.1.linear.weight"])


def test_a_trial_undoes_what_is_written_to_weights_and_what_eval_itself_does():
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
