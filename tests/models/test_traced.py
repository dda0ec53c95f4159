"""Modules that are no chain of blocks, cut where a single tensor passes; and why others are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ptdbench.models.foreign import adapt
from ptdbench.models.protocol import members
from tests.models.assembled import assembled
from tests.models.test_chain import WIDTH, Net, Residual, check_pieces, example, run


class Plain(nn.Module):
    """Layers by name, as most small models are written."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.dropout(torch.relu(self.first(x)))
        x = x + torch.tanh(self.second(x))
        return self.third(x.view(x.size(0), -1)) * torch.arange(1.0, 5.0)


def plain(forward, **parts):
    return lambda: assembled(forward, Plain, **parts)


def by_default(self, x, mask=None):
    """Has an argument that nobody gives."""
    x = self.first(x)
    return self.third(self.second(x if mask is None else x * mask))


@pytest.mark.parametrize(
    ("build", "cuts"),
    [
        (Plain, [["first", "dropout"], ["second"], ["third"]]),
        (Residual, [["stem"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["head"]]),
        # What is between two calls of a layer belongs to the same stage.
        (plain(lambda self, x: self.third(self.second(self.dropout(self.second(self.first(x)))))),
         [["first"], ["second", "dropout"], ["third"]]),
        (plain(by_default), [["first"], ["second"], ["third"]]),
    ],
)  # fmt: skip
def test_pieces_compute_the_module(build, cuts):
    model = adapt(build(), example)
    parts = model.parts()
    check_pieces(model.eval())
    assert [[name.removeprefix("module.") for name in members(key, part)] for key, part in parts.items()] == cuts


def test_dropout_is_that_of_the_mode():
    model = adapt(Plain(), example)
    inputs = torch.randn(64, 6)
    assert not torch.equal(run(model, inputs), run(model, inputs))
    model.eval()
    assert torch.equal(run(model, inputs), run(model, inputs))


@pytest.mark.parametrize("build", [Net, Plain])
def test_trial_keeps_random_state_and_mode(build):
    model = adapt(build(), example)
    state = torch.random.get_rng_state()
    model.parts()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def branches(self, x):
    x = self.first(x)
    return self.third(self.second(x) if x.sum() > 0 else x)


def drops(self, x):
    """Its dropout is no module: traced, it would be that of training for ever."""
    return self.third(self.second(functional.dropout(self.first(x), training=self.training)))


BLOCKS = "it has no parts() and no list of blocks of one class, and "


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (plain(lambda self, x: self.third(self.second(self.first(x))) + self.fourth(x), fourth=nn.Linear(6, 4)),
         "more than one tensor passes between its submodules"),
        (plain(branches),
         "it cannot be traced: symbolically traced variables cannot be used as inputs to control flow"),
        (plain(drops), "its submodules, called one after the other, compute something else"),
        (plain(Plain.forward, second=nn.Linear(3, 3)),
         "it cannot be tried in pieces: mat1 and mat2 shapes cannot be multiplied (2x8 and 3x3)"),
        (plain(lambda self, x: Plain.forward(self, x) * self.scale, scale=nn.Parameter(torch.ones(4))),
         "Assembled itself owns scale"),
        (plain(lambda self, x: Plain.forward(self, x - self.mean), mean=nn.Buffer(torch.ones(6))),
         "Assembled itself owns buffer mean"),
        (plain(lambda self, x: Plain.forward(self, x) @ self.first.weight[:4, :4]),
         "it reads first.weight outside the module that owns it"),
        (lambda: nn.Linear(6, 4), "Linear itself owns weight and bias"),
    ],
)  # fmt: skip
def test_tracing_refusals(build, reason):
    model = adapt(build(), example)
    assert model.parts() is None
    assert model.unsplit[0].replace("addmm: ", "") == BLOCKS + reason  # since torch 2.15 it names the operation
