"""The state of a module besides its weights: put back whatever happened to it, and run again."""

import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.state import Modes, ModuleState, preserved


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
        self.count, self.plain, self.generator = 0, torch.zeros(2), torch.Generator().manual_seed(0)
        self.history, self.table, self.last, self.seen = [[]], {"a": torch.zeros(2)}, deque(maxlen=2), {0}
        self.counts, self.notes, self.more = Counter(), Notes(), SimpleNamespace(steps=0)
        self.held = (nn.Dropout(), Notes())  # modules that are not registered
        self.draws = random.Random(0)

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
        noise = torch.rand(2, generator=self.generator) + self.draws.random()
        return self.norm(self.linear(inputs)) * (self.written + self.count + self.notes.steps) + noise


CHANGED = {
    "written", "replaced", "absent", "count", "plain", "history", "table.a", "table.1", "last", "seen",
    "counts.steps", "notes.steps", "more.steps", "held.p", "held.steps", "new", "norm.running_mean", "norm.running_var",
    "norm.num_batches_tracked",
}  # fmt: skip


@pytest.fixture
def module() -> Stateful:
    return Stateful()


INPUTS = torch.arange(8.0).view(4, 2)


def test_all_that_a_pass_changes_is_put_back_and_named_before(module):
    first = module(INPUTS).detach()
    buffers, table = dict(module.named_buffers()), module.table
    state = ModuleState(module)
    second = module(INPUTS)
    second.sum().backward()
    module.norm.eval()
    module.linear.bias.requires_grad_(False)
    assert {*state.changes()} >= {name for name in CHANGED if name not in ("table.1", "new", "absent")}
    state.restore()
    assert state.changes() == []
    assert all(buffers[name] is buffer for name, buffer in module.named_buffers())
    assert module.table is table
    assert (module.count, module.history, module.last.maxlen, module.norm.training) == (1, [[1]], 2, True)
    assert all(weight.grad is None and weight.requires_grad for weight in module.parameters())
    assert torch.equal(module(INPUTS), second)
    assert not torch.equal(first, second)


def test_what_a_pass_creates_is_gone_again(module):
    with preserved(module) as state:
        module(INPUTS)
        assert {*state.changes()} == CHANGED
    assert state.changes() == []
    assert not hasattr(module, "new")
    assert (module.absent, module.seen, module.table.keys()) == (None, {0}, {"a"})


def test_a_pass_runs_again_on_the_state_it_had_and_leaves_that_of_now(module):
    before = ModuleState(module)
    first = module(INPUTS)
    module(INPUTS)
    now = ModuleState(module)
    version = module.written._version
    for _ in range(2):
        with before.replayed():
            assert torch.equal(module(INPUTS), first)
        assert now.changes() == []
    assert module.written._version == version  # what autograd has saved of it is still valid


class Insists(nn.Module):
    """Keeps its norm in eval mode by overriding ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize(
    ("built", "frozen"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval()), ["1"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval(), []),
        (lambda: nn.Sequential(Insists(), nn.Dropout()), ["0.norm"]),
        (lambda: nn.Sequential(Insists().eval(), nn.Dropout()), ["0", "0.norm"]),
    ],
)
def test_parts_stay_in_the_mode_that_the_constructor_or_train_chose(built, frozen):
    module = built()
    modes = Modes(module)
    modes.train()
    assert [name for name, part in module.named_modules() if not part.training] == frozen
    modes.evaluate()
    assert not any(part.training for part in module.modules())
    modes.train()
    assert [name for name, part in module.named_modules() if not part.training] == frozen
