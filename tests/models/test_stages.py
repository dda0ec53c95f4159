"""Modules that say nothing of stages, cut into pieces between their units; and why others are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ptdbench.models import stages
from ptdbench.models.foreign import adapt, repeated
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


def skips(self, inputs):
    """Its head also uses the stem's output, as a U-Net does."""
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


class Patched(nn.Module):
    """A Vision Transformer's form: weights and a buffer of its own, and others of a module around the blocks."""

    def __init__(self):
        super().__init__()
        self.net, self.token = Net(), nn.Parameter(torch.randn(1, 1, 6))
        self.net.shift = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Buffer(torch.tensor(2.0))

    def forward(self, inputs):
        hidden = self.net.stem(torch.cat([self.token.expand(len(inputs), -1, -1), inputs.unsqueeze(1)], 1) * self.scale)
        hidden += self.net.shift
        for block in self.net.blocks:
            hidden = block(hidden)
        return self.net.head(hidden)[:, 0]


class Translator(nn.Module):
    """An encoder and a decoder that attends to what the former returns, with a mask; one table is in both."""

    def __init__(self, layers=2):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.table = self.decoder.table = nn.Embedding(12, WIDTH)
        options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.encoder.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, **options) for _ in range(layers))
        self.decoder.layers = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, **options) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, source, given, mask):
        hidden = self.encoder.table(source)
        for layer in self.encoder.layers:
            hidden = layer(hidden, src_key_padding_mask=mask == 0)
        translated = self.decoder.table(given)
        for layer in self.decoder.layers:
            translated = layer(translated, hidden, memory_key_padding_mask=mask == 0)
        return self.head(translated)


def example():
    return torch.empty(1, 6, device="meta"), torch.empty(1, 4, device="meta")


def words():
    tokens = torch.empty(1, 5, dtype=torch.int64, device="meta")
    return {"source": tokens, "given": tokens, "mask": tokens}, tokens


def run(model, inputs, targets=None):
    arrived = ()
    for name in model.parts():
        arrived = model.runner([name])(model, arrived, inputs, targets)
    return arrived


def sequential():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4), nn.Tanh())


def check_pieces(model, inputs=None, targets=None):
    """The pieces of a model, one after the other, compute what it computes, and have its weights under their names."""
    held = {
        f"{member}.{name}" if name != "loose" else member
        for key, part in model.parts().items()
        for member, module in members(key, part).items()
        for name in ([name for name, _ in module.named_parameters()] or ["loose"])
    }
    assert held == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    inputs, targets = torch.randn(5, 6) if inputs is None else inputs, torch.randn(5, 4) if targets is None else targets
    assert torch.equal(run(model, inputs), model(inputs))
    assert torch.equal(run(model, inputs, targets), model(inputs, targets))
    model(inputs, targets).backward()
    whole = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    run(model, inputs, targets).backward()
    assert all(torch.equal(weight.grad, whole[name]) for name, weight in model.named_parameters())


def cuts(model):
    return [[name.removeprefix("module.") for name in members(key, part)] for key, part in model.parts().items()]


STEM_TO_HEAD = [["stem"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["head"]]


def drops(self, x):
    return self.third(self.second(functional.dropout(self.first(x), training=self.training)))


def by_table(self, inputs):
    """Reads a table's weight, as DeBERTa does for relative positions."""
    return Net.forward(self, inputs * self.table.weight[1])


def twice(self, x):
    """What is between two calls of a layer belongs to the same stage."""
    return self.third(self.second(self.dropout(self.second(self.first(x)))))


@pytest.mark.parametrize(("build", "expected"), [
    *((build, STEM_TO_HEAD) for build in (Net, Alternating, Patches, ByTable, Residual, net(skips))),
    (Again, [["stem"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"], ["head"]]),
    (
        Patched,
        [["token"], ["net.stem"], ["net.shift"], *([f"net.blocks.{number}"] for number in range(3)), ["net.head"]],
    ),
    (net(by_table, table=nn.Embedding(2, 6)), [["table.weight"], *STEM_TO_HEAD]),
    (sequential, [["1"], ["3"]]),
    (Plain, [["first"], ["second"], ["third"]]),
    (plain(by_default), [["first"], ["second"], ["third"]]),
    (plain(twice), [["first"], ["second"], ["third"]]),
])  # fmt: skip
def test_pieces_compute_the_module(build, expected):
    model = adapt(build(), example)
    assert cuts(model) == expected
    check_pieces(model.eval())


def sentences():
    source, given = torch.randint(12, (2, 5, 5))
    mask = torch.ones(5, 5, dtype=torch.int64).tril()
    return {"source": source, "given": given, "mask": mask}, torch.randint(12, (5, 5))


def test_encoder_output_is_sent_to_decoder_stages():
    model = adapt(Translator(), words)
    layers = [[f"{coder}.layers.{number}"] for coder in ("encoder", "decoder") for number in (0, 1)]
    assert cuts(model) == [["encoder.table"], *layers[:2], ["decoder.table"], *layers[2:], ["head"]]
    inputs, targets = sentences()
    check_pieces(model, inputs, targets)
    arrived, sent = (), []
    for name in [*model.parts()][:-1]:
        arrived = model.runner([name])(model, arrived, inputs, targets)
        sent.append(len(arrived))
    assert sent == [1, 1, 1, 2, 2, 1]


def test_faults_are_seen(monkeypatch):
    """A stage that loses a mask, and values that skip a stage and arrive in each other's place."""
    model = adapt(Translator(), words)
    inputs, targets = sentences()
    expected, arrived = model(inputs, targets), ()
    for name in model.parts():
        lost = inputs | {"mask": torch.ones_like(inputs["mask"])} if name == "decoder.layers.1" else inputs
        arrived = model.runner([name])(model, arrived, lost, targets)
    assert not torch.equal(arrived, expected)
    of_stage = stages.Replay.__init__
    monkeypatch.setattr(
        stages.Replay, "__init__", lambda self, *values: of_stage(self, *values[:3], values[3][::-1], *values[4:])
    )
    assert adapt(Translator(), words).parts() is None


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
    name, part = list(model.parts().items())[number]
    for module in members("", part).values():
        module.to("meta")
    arrived = [torch.empty(3, WIDTH, device="meta")] if number else []
    sent = model.runner([name])(model, arrived, torch.empty(3, 6, device="meta"), None)
    assert (sent if number == 4 else sent[0]).is_meta


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


def test_trial_leaves_no_trace():
    model = adapt(Remembers(), example)
    state = torch.random.get_rng_state()
    assert model.parts()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert model.module.scale is None
    assert not any(hasattr(block, "seen") for block in model.module.blocks)


def test_dropout_is_that_of_the_mode():
    model = adapt(plain(drops)(), example)
    inputs = torch.randn(64, 6)
    assert not torch.equal(run(model, inputs), run(model, inputs))
    model.eval()
    assert torch.equal(run(model, inputs), run(model, inputs))


def branches(self, x):
    x = self.first(x)
    return self.third(self.second(x) if x.sum() > 1e9 else x)


NOWHERE = "there is no place between its submodules where only floating-point tensors pass"
OUTSIDE = "it uses {} outside the module that owns it"


@pytest.mark.parametrize(("build", "reason"), [
    (plain(branches), "it does not call second, which has weights"),
    (plain(Plain.forward, second=nn.Linear(3, 3)),
     "its forward cannot be followed: mat1 and mat2 shapes cannot be multiplied (2x8 and 3x3)"),
    # As language models do whose embedding is their head, and the other way round.
    (net(lambda self, inputs: Net.forward(self, inputs) @ self.stem.weight[:4, :4]), OUTSIDE.format("stem.weight")),
    (net(lambda self, inputs: Net.forward(self, inputs * self.head.weight.sum())), OUTSIDE.format("head.weight")),
    (BlocksOnWeights, OUTSIDE.format("blocks.0.norm.weight")),
    (Checkpointed, "its forward cannot be followed: When use_reentrant=True, torch.utils.checkpoint is"),
    (lambda: assembled(Net.forward, Net, unused=nn.Linear(2, 2)), "it does not call unused, which has weights"),
    (lambda: nn.Linear(6, 4), NOWHERE),
])  # fmt: skip
def test_refusals(build, reason):
    model = adapt(build(), example)
    assert model.parts() is None
    assert model.unsplit.replace("addmm: ", "").startswith(reason)  # since torch 2.15 it names the operation


class Heads(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8))


class TestRepeated:
    def names(self, module):
        return list(repeated(module))

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
