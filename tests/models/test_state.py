"""The state of a module besides its weights: put back whatever happened to it, and run again."""

import copy
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.state import Modes, ModuleState


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
