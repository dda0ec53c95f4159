"""The state of a module besides its weights, restored and run again; trial passes leave the module as it was."""

import copy
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.foreign import adapt
from ptdbench.models.state import Modes, ModuleState, observe, trial
from tests.models.assembled import assembled


class Notes:
    """An object of the module's own package."""

    def __init__(self) -> None:
        self.steps = 0


class Stateful(nn.Module):
    """Keeps state wherever Python lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(2))
        self.register_buffer("absent", None)
        self.count, self.plain = 0, torch.zeros(2)
        self.history, self.table, self.last, self.seen = [[]], {"a": torch.zeros(2)}, deque(maxlen=2), {0}
        self.counts, self.notes, self.more = Counter(), Notes(), SimpleNamespace(steps=0)
        self.held = (nn.Dropout(), Notes())  # modules that are not registered

    def forward(self, inputs: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        self.absent = torch.ones(2)
        self.count += 1
        self.plain.add_(1)
        self.history[0].append(self.count)
        self.table["a"] += 1
        self.table[self.count] = self.plain.clone()
        self.last.append(self.count)
        self.seen.add(self.count)
        self.counts["steps"] += 1
        self.notes.steps += 1
        self.more.steps += 1
        self.held[0].p /= 2
        self.held[1].steps += 1
        self.new = torch.ones(2)
        return self.norm(self.linear(inputs)) * (self.written + self.count + self.notes.steps)


INPUTS = torch.arange(8.0).view(4, 2)


@pytest.fixture
def module() -> Stateful:
    return Stateful()


def content(module: Stateful) -> list[Any]:
    """All that a pass changes, with the identity of what must stay the same object."""
    kept = [module.written, module.replaced, module.expanded, module.plain, module.table["a"], *module.norm.buffers()]
    plain = [module.count, module.history, module.last, module.seen, module.counts, module.notes.steps]
    others = [sorted(map(str, module.table)), module.more.steps, module.held[0].p, module.held[1].steps]
    modes = [part.training for part in module.modules()], [weight.requires_grad for weight in module.parameters()]
    return [
        [(id(tensor), tensor.tolist()) for tensor in kept], copy.deepcopy(plain), others, modes,
        hasattr(module, "new"), module.absent is None,
    ]  # fmt: skip


@pytest.mark.parametrize("passes", [0, 2])
def test_restore_undoes_a_pass(module, passes):
    for _ in range(passes):
        module(INPUTS)
    before, state = content(module), ModuleState(module)
    outputs = module(INPUTS)
    outputs.sum().backward()
    module.norm.eval()
    module.linear.bias.requires_grad_(False)
    after = content(module)
    assert all(former != other for former, other in zip(before[:4], after[:4], strict=True))
    state.restore()
    assert content(module) == before
    assert all(weight.grad is None for weight in module.parameters())
    assert module.last.maxlen == 2
    assert torch.equal(module(INPUTS), outputs)


def test_replay_uses_the_former_state(module):
    before = ModuleState(module)
    first = module(INPUTS)
    assert not torch.equal(module(INPUTS), first)
    now, version = content(module), module.written._version
    for _ in range(2):
        with before.replayed():
            assert torch.equal(module(INPUTS), first)
        assert content(module) == now
    assert module.written._version == version  # what autograd has saved of it is still valid


class Insists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize(("built", "frozen"), [
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval()), ["1"]),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval(), []),
    (lambda: nn.Sequential(Insists(), nn.Dropout()), ["0.norm"]),
    (lambda: nn.Sequential(Insists().eval(), nn.Dropout()), ["0", "0.norm"]),
])  # fmt: skip
def test_frozen_parts_stay_in_eval_mode(built, frozen):
    module = built()
    modes = Modes(module)
    modes.train()
    assert [name for name, part in module.named_modules() if not part.training] == frozen
    modes.evaluate()
    assert not any(part.training for part in module.modules())
    modes.train()
    assert [name for name, part in module.named_modules() if not part.training] == frozen


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
