"""Modules that say nothing of stages, cut between their repeated blocks; and why others are not."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptdbench.models import chain
from ptdbench.models.foreign import adapt
from ptdbench.models.protocol import members
from tests.models.assembled import assembled

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, scale=None):
        hidden = hidden + self.linear(self.norm(hidden))
        return hidden if scale is None else hidden * scale


class Net(nn.Module):
    """A stem, a list of blocks and a head, as most people write it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs):
        hidden = first = self.stem(inputs)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, **self.beside(number, first))
        return self.head(hidden)

    def beside(self, number, first):
        """What a block gets beside the hidden state; ``first``: what the first one gets."""
        return {}


def net(forward=Net.forward, **parts):
    """Another of such parts, called otherwise; ``beside``: a function of a block's number and the stem's output."""
    return lambda: assembled(forward, Net, **parts)


class Alternating(Net):
    """Every other of its blocks gets another constant, as masks alternate in a Gemma, in the dtype of the stem."""

    def beside(self, number, first):
        scale = torch.arange(1.0, WIDTH + 1, dtype=first.dtype)
        return {"scale": scale if number % 2 else scale.flip(0)}


class ByTable(Net):
    """As positions are in a Llama: a module without weights makes what each block gets."""

    def __init__(self):
        super().__init__()
        self.table = assembled(lambda self: self.scale, scale=nn.Buffer(torch.arange(1.0, WIDTH + 1), persistent=False))

    def forward(self, inputs):
        hidden, scale = self.stem(inputs) * self.table(), self.table()
        for block in self.blocks:
            hidden = block(hidden, scale)
        return self.head(hidden) * self.table()[:4]


def particular(number, first):
    """Cannot be called with a stem's output that is all the same."""
    if first.std() == 0:
        raise AttributeError("nothing to tell apart")
    return {}


def through(step):
    """A net in which this is done with each block and the hidden state."""

    def forward(self, inputs):
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = step(block, hidden)
        return self.head(hidden)

    return net(forward)


Residual = through(lambda block, hidden: hidden + block(hidden))
#: Recomputes its blocks in the way that was torch's default for long.
Checkpointed = through(lambda block, hidden: checkpoint(block, hidden, use_reentrant=True))
#: Asks for the dtype of its stem's weight, as Vision Transformers do.
Patches = net(lambda self, inputs: Net.forward(self, inputs.to(self.stem.weight.dtype)))


def skips(self, inputs):
    hidden = self.stem(inputs)
    for block in reversed(self.blocks):
        hidden = block(hidden)
    return self.head(hidden)


def head_on_stem(self, inputs):
    """The head looks back at the stem: the chain is none, though its blocks are."""
    first = hidden = self.stem(inputs)
    for block in self.blocks:
        hidden = block(hidden)
    return self.head(hidden + first)


class BlocksOnWeights(Net):
    def beside(self, number, first):
        return {"scale": self.blocks[0].norm.weight}


class Again(Net):
    def __init__(self):
        super().__init__()
        self.blocks.append(self.blocks[0])


def example():
    return torch.empty(1, 6, device="meta"), torch.empty(1, 4, device="meta")


def run(model, inputs, targets=None):
    *front, last = model.parts().values()
    for part in front:
        inputs = part(inputs)
    return last(inputs) if targets is None else last(inputs, targets)


def sequential():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4), nn.Tanh())


def activated_by_one():
    """An activation without weights that is one module in two places."""
    activation = nn.Tanh()
    return nn.Sequential(nn.Linear(6, WIDTH), activation, nn.Linear(WIDTH, 4), activation)


class Named(nn.Sequential):
    """A Sequential of the user's own, with the forward of every Sequential."""

    def __init__(self):
        super().__init__(*sequential())


class OfItsOwn(Named):
    def forward(self, x):
        return super().forward(x) + 1


def check_pieces(model):
    """The parts of a model, one after the other, compute what it computes, and have its weights under their names."""
    held = [
        f"{member}.{name}"
        for key, part in model.parts().items()
        for member, module in members(key, part).items()
        for name, _ in module.named_parameters()
    ]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    inputs, targets = torch.randn(5, 6), torch.randn(5, 4)
    assert torch.equal(run(model, inputs), model(inputs))
    assert torch.equal(run(model, inputs, targets), model(inputs, targets))
    model(inputs, targets).backward()
    whole = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    run(model, inputs, targets).backward()
    assert all(torch.equal(weight.grad, whole[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("build", [Net, Alternating, Patches, ByTable, sequential, activated_by_one, Named, OfItsOwn])
def test_pieces_compute_the_module(build):
    check_pieces(adapt(build(), example))


def test_pieces_of_a_copy_are_its_own():
    """As a lone stage copies the model to learn what arrives."""
    model = adapt(Alternating(), example)
    model.parts()
    twin = copy.deepcopy(model)
    check_pieces(twin)
    inputs = torch.randn(5, 6).bfloat16()
    assert torch.equal(run(twin.bfloat16(), inputs), twin(inputs))


@pytest.mark.parametrize("number", range(5))
def test_each_piece_runs_where_its_weights_are(number):
    """Also where it is alone, and tables of the module are on another device."""
    model = adapt(ByTable(), example)
    part = list(model.parts().values())[number]
    for module in members("", part).values():
        module.to("meta")
    assert part(torch.empty(3, 6 if number == 0 else WIDTH, device="meta")).is_meta


class Remembers(Net):
    def __init__(self):
        super().__init__()
        self.scale = None
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, _: setattr(block, "seen", True))

    def forward(self, inputs):
        if self.scale is None:
            self.scale = torch.ones(4, device=inputs.device)
        return super().forward(inputs) * self.scale


def test_checkpointing_module_keeps_its_gradients():
    module = Checkpointed()
    inputs, targets = torch.randn(3, 6), torch.randn(3, 4)
    module_again = copy.deepcopy(module)
    (module_again(inputs) - targets).square().mean().backward()
    model = adapt(module, example)
    model.train_flops()
    *parts, last = model.parts().values()
    assert all(weight.grad is None for weight in module.parameters())
    for part in parts:
        inputs = part(inputs)
    last(inputs, targets).backward()
    for weight, expected in zip(module.parameters(), module_again.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)


def test_trial_leaves_module_and_pieces_clean():
    """The run may be on another device."""
    model = adapt(Remembers(), example)
    *_, last = model.parts().values()
    assert model.module.scale is None
    assert not any(hasattr(block, "seen") for block in model.module.blocks)
    for module in members("", last).values():
        module.to("meta")
    assert last(torch.empty(3, WIDTH, device="meta")).is_meta


def test_modules_without_weights_join_a_piece():
    assert [len(members("", part)) for part in adapt(sequential(), example).parts().values()] == [3, 2]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        # The last of its blocks gets what depends on the samples.
        (net(beside=lambda number, first: {"scale": first.mean(1, keepdim=True)} if number == 2 else {}),
         "its blocks take other arguments that depend on samples or weights"),
        (net(beside=particular), "its blocks cannot be tried apart: nothing to tell apart"),
        (Residual, "it does not call blocks.1 with the output of blocks.0"),
        (net(skips), "it does not call blocks.0 to blocks.2 once each and in order"),
        (net(lambda self, inputs: Net.forward(self, inputs) + self.shift, shift=nn.Parameter(torch.zeros(4))),
         "Assembled itself owns shift"),
        (Again, "it calls blocks.3.norm between its blocks"),
        (net(head_on_stem), "it uses what comes before its blocks after them too"),
        # As language models do whose embedding is their head, and the other way round.
        (net(lambda self, inputs: Net.forward(self, inputs) @ self.stem.weight.T[:4]),
         "it uses what comes before its blocks after them too"),
        (net(lambda self, inputs: Net.forward(self, inputs * self.head.weight.sum())),
         "it uses what comes after its blocks before them too"),
        (BlocksOnWeights, "its blocks take other arguments that depend on samples or weights"),
        (Checkpointed, "it passes no gradient to its last block, as under reentrant checkpointing"),
        (lambda: nn.Linear(6, 4), "it has no parts() and no list of blocks of one class"),
    ],
)  # fmt: skip
def test_chain_refusals(build, reason):
    module = build()
    with pytest.raises(chain.NoChain, match=f"^{re.escape(reason)}$"):
        chain.Chain(module, chain.repeated(module), lambda net, x: net(x), lambda outputs, _: outputs, example()[0])


def test_repeated_weights_are_no_chain():
    linear = nn.Linear(6, 6)
    model = adapt(nn.Sequential(linear, nn.ReLU(), nn.Sequential(linear), nn.Linear(6, 4)), example)
    assert model.parts() is None
    assert model.unsplit[0] == "it has no parts(), and runs Linear in both 0 and 2"


class Heads(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8))


class TestRepeated:
    def names(self, module):
        return list(chain.repeated(module))

    def test_the_longest_lists_of_one_class_are_the_blocks(self):
        assert self.names(Net()) == ["blocks.0", "blocks.1", "blocks.2"]
        assert self.names(sequential()) == []
        assert self.names(nn.ModuleList(nn.Linear(2, 2) for _ in range(3))) == []  # single layers are no blocks
        from torchvision.models import resnet18

        assert self.names(resnet18()) == [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]

    def test_lists_within_blocks_are_not_listed_and_stages_of_growing_width_none(self):
        assert self.names(nn.ModuleList(Heads() for _ in range(4))) == ["0", "1", "2", "3"]
        stages = nn.ModuleList(Heads(width) for width in (2, 4))
        assert self.names(stages) == [f"{stage}.heads.{block}" for stage in (0, 1) for block in range(8)]

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.ModuleList(Block() for _ in range(2))

        assert self.names(nn.ModuleList(Outer() for _ in range(3))) == ["0", "1", "2"]
