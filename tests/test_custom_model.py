"""A model from outside of the package: any module, under every strategy that it says enough for."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daily import cases

pytestmark = pytest.mark.ranks

MY_PACKAGE = '''
import torch
from torch import nn


class Plain(nn.Module):
    """Says nothing about itself."""

    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 5))

    def forward(self, inputs):
        return self.net(inputs)


class First(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).tanh()


class Last(nn.Linear):
    def forward(self, inputs, targets=None):
        outputs = super().forward(inputs)
        return outputs if targets is None else (outputs - targets).abs().mean()


class OnlyParts(nn.Module):
    """A chain, two of whose parts share their weight; nothing about layers, costs or initial values."""

    def __init__(self, width):
        super().__init__()
        self.start = First(6, width)
        self.before = First(width, width)
        self.blocks = nn.ModuleList(First(width, width) for _ in range(2))
        self.after = First(width, width)
        self.end = Last(width, 4)
        self.after.weight = self.before.weight

    def forward(self, inputs, targets=None):
        *chain, last = self.parts().values()
        for part in chain:
            inputs = part(inputs)
        return last(inputs, targets)

    def parts(self):
        names = ["start", "before", "blocks.0", "blocks.1", "after", "end"]
        return {name: self.get_submodule(name) for name in names}

    def tied(self):
        return [("before.weight", "after.weight")]


class Protocol(OnlyParts):
    """All that a module may say."""

    def layers(self):
        return list(self.blocks)

    def train_flops(self):
        return {name: 6.0 * part.weight.numel() for name, part in self.parts().items()}

    def reset(self, name, tensor, generator):
        nn.init.normal_(tensor, std=0.4, generator=generator)
'''
IMAGES = ("data=synthetic_images", "data.image_size=8", "data.classes=5", "+model.width=8")
VECTORS = ("data=synthetic_vectors", "data.inputs=6", "data.outputs=4", "+model.width=8")
COMMON = ("model=custom", "train.steps=6", "train.global_batch=16", "device=cpu", "optimizer.lr=1e-2")


@pytest.fixture
def my_package(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder of the user's package, on the path of this process and of ranks."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_package.py").write_text(MY_PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("my_package", None)


@cases(
    ("name", "data", "strategies"),
    [
        ("Plain", IMAGES, ("ddp", "fsdp", "pdp")),
        ("Protocol", VECTORS, ("ddp", "fsdp", "pdp")),
        ("OnlyParts", VECTORS, ("fsdp", "pdp")),
    ],
    daily=[("Plain", IMAGES, ("ddp", "fsdp", "pdp")), ("Protocol", VECTORS, ("ddp", "fsdp", "pdp"))],
)
def test_every_strategy_trains_it_as_one_process_does(shared_run, my_package, name, data, strategies):
    options = (*COMMON, f"model._target_=my_package.{name}", *data)
    alone = shared_run(*options, "parallel=single")
    assert (alone["error"], alone["model"]) == (None, name)
    assert abs(alone["losses"][-1] / alone["losses"][0] - 1) > 1e-3  # it moved, so that wrong gradients would show
    if name == "Plain":  # two products for the convolution, whose input needs no gradient, and three for the other
        flops = alone["metrics"]["model_flops_per_second"] / alone["metrics"]["samples_per_second"]
        assert flops == pytest.approx(2 * (2 * 3 * 9 * 8 * 64) + 3 * (2 * 8 * 64 * 5), rel=1e-6)
    for strategy in strategies:
        record = shared_run(*options, f"parallel={strategy}", "train.micro_batch=2")
        assert record["error"] is None
        assert record["world_size"] == 2
        assert record["losses"] == pytest.approx(alone["losses"], rel=1e-5), strategy
        assert record["parameters"] == alone["parameters"]
