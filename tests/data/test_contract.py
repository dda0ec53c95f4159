"""What :mod:`ptdbench.data.protocol` promises, of every source of samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ptdbench.data.cifar10 import Cifar10
from ptdbench.data.digits import Digits
from ptdbench.data.image_folder import ImageFolder
from ptdbench.data.protocol import Data, Images
from ptdbench.data.synthetic import SyntheticImages, SyntheticTokens, SyntheticVectors
from ptdbench.data.text import Text
from tests.conftest import ROOT
from tests.data import small_cifar10
from tests.data.made import image_files, problems_of
from tests.data.small_cifar10 import SmallCifar10

#: Kept aside by the content of documents.
SOME = -1
#: What each is made of beside a seed, from a folder; its samples of an epoch, and how many it keeps aside.
SOURCES: dict[str, tuple[type[Data], dict[str, Any], int, int | None]] = {
    "synthetic_tokens": (SyntheticTokens, {"sequence_length": 16, "vocabulary": 1000}, 8, None),
    "synthetic_vectors": (SyntheticVectors, {"inputs": 5, "outputs": 7}, 8, None),
    "text": (Text, {"sequence_length": 16, "vocabulary": 256, "path": "{}/texts"}, 8, None),
    "text in two parts": (
        Text, {"sequence_length": 3, "vocabulary": 256, "path": "{}/texts", "held_out": 0.3}, 8, SOME
    ),
    "synthetic_images": (SyntheticImages, {"image_size": 16, "classes": 10, "pool": 24}, 24, None),
    "digits": (Digits, {"held_out": 20}, 1777, 20),
    "cifar10": (SmallCifar10, {"root": "{}/cifar"}, 200, 20),
    "image_folder": (ImageFolder, {"root": "{}/images", "classes": 3, "image_size": 32, "workers": 3}, 18, 6),
}  # fmt: skip
SOURCES |= {
    f"{name} channel by channel": (kind, options | {"channels_last": False}, *counts)
    for name, (kind, options, *counts) in SOURCES.items()
    if issubclass(kind, Images)
}


def made(name: str, folder: Path, seed: int) -> Data:
    kind, options, *_ = SOURCES[name]
    texts = {option: value.format(folder) for option, value in options.items() if isinstance(value, str)}
    return kind(**options | texts, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    small_cifar10.write(root / "cifar")
    (root / "texts").mkdir()
    for number in range(40):
        (root / "texts" / f"{number}.txt").write_text(f"document {number:02}")
    image_files(root / "images")
    return root


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(params=SOURCES)
def name(request) -> str:
    return request.param


@pytest.fixture
def make(name, folder) -> Callable[..., Data]:
    def prepared(seed: int = 3) -> Data:
        data = made(name, folder, seed)
        data.prepare()
        return data

    return prepared


#: Values that are refused, all but a vocabulary of 256.
REFUSED: list[tuple[type[Data], dict[str, Any]]] = [
    (SyntheticTokens, dict.fromkeys(["sequence_length", "vocabulary", "seed"], -1)),
    (SyntheticImages, dict.fromkeys(["image_size", "classes", "pool", "seed"], -1)),
    (SyntheticVectors, dict.fromkeys(["inputs", "outputs", "seed"], -1)),
    (Digits, dict.fromkeys(["seed", "shift", "held_out", "classes", "image_size"], -1)),
    (Cifar10, {"seed": -1, "padding": -1, "root": "nowhere", "classes": -1, "image_size": -1}),
    (ImageFolder, {"classes": -1, "image_size": -1, "seed": -1, "workers": -1, "root": "nowhere"}),
    (Text, {"sequence_length": -1, "vocabulary": -1, "seed": -1, "path": "nowhere"}),
    (Text, {"sequence_length": -1, "tokenizer": "none", "seed": -1, "held_out": 1, "vocabulary": 256}),
]


@pytest.mark.parametrize(("kind", "options"), REFUSED)
def test_all_refused_options_come_at_once(kind, options):
    refused = [name for name, value in options.items() if value != 256]
    assert [problem.option for problem in problems_of(kind, **options)] == refused


def test_every_choice_is_looked_at():
    others = {"custom", "synthetic_inputs"}  # whose batches are of any form: test_protocol.py, test_synthetic_inputs.py
    assert {file.stem for file in (ROOT / "conf" / "data").iterdir()} - others == {name.split()[0] for name in SOURCES}


def test_samples_depend_on_their_number_only(make, name):
    epoch = SOURCES[name][2]
    whole = make().samples(epoch - 7, epoch + 7)  # over its end
    other = make()
    torch.rand(7)
    later = other.samples(epoch + 2, epoch + 7)
    earlier = other.samples(epoch - 7, epoch + 2)
    for all_at_once, a, b in zip(whole, earlier, later, strict=True):
        assert torch.equal(all_at_once, torch.cat([a, b]))


def test_seeds_differ_and_samples_differ(make):
    inputs, _ = make(seed=0).samples(0, 8)
    assert len(inputs.flatten(1).unique(dim=0)) > 4
    assert not torch.equal(inputs, make(seed=1).samples(0, 8)[0])


def test_example_has_the_shape_of_samples(make, name, tmp_path):
    (tmp_path / "images" / "train").mkdir(parents=True)
    for folder in ("cifar", "texts"):
        (tmp_path / folder).mkdir()
    example = made(name, tmp_path, seed=3).example()
    batches = (make().samples(*rows) for rows in ((0, 1), (0, 3), (5, 5)))
    for expected, sample, three, none in zip(example, *batches, strict=True):
        assert expected.is_meta
        assert (expected.shape, expected.dtype) == (sample.shape, sample.dtype)
        assert (three.shape, none.shape) == ((3, *expected.shape[1:]), (0, *expected.shape[1:]))
        if expected.dim() == 4:  # what a model is laid out by
            channels_last = not name.endswith("channel by channel")
            assert expected.is_contiguous() != channels_last
            assert expected.stride() == sample.stride()
            assert three.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        else:
            assert sample.is_contiguous()
    are_sequences = "text" in name or "tokens" in name
    assert make().tokens_per_sample == (example[0].shape[1] if are_sequences else None)


def test_held_out_part_is_fixed(make, name):
    count = SOURCES[name][3]
    held_out, others = make(seed=0).held_out, make(seed=1).held_out
    if count is None:
        assert held_out is None
        return
    count = len(held_out) if count == SOME else count
    assert len(held_out) == count > 5
    whole = held_out.samples(0, count)
    parts = [held_out.samples(0, 4), held_out.samples(4, 4), others.samples(4, count)]
    for tensor, *cut in zip(whole, *parts, strict=True):
        assert torch.equal(tensor, torch.cat(cut))
    for start, stop in ((0, count + 1), (-1, 3), (5, 4)):
        with pytest.raises(IndexError):
            held_out.samples(start, stop)
