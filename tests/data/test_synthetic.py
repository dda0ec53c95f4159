import math

import pytest
import torch

from ptdbench.data.synthetic import SyntheticImages, SyntheticTokens, SyntheticVectors
from ptdbench.problems import ConfigError


def tokens(seed=0):
    return SyntheticTokens(sequence_length=16, vocabulary=1000, seed=seed)


def images(seed=0):
    return SyntheticImages(image_size=16, classes=10, seed=seed, pool=24)


def vectors(seed=0):
    return SyntheticVectors(inputs=5, outputs=7, seed=seed)


every_source = pytest.mark.parametrize("make", [tokens, images, vectors])


def test_targets_of_tokens_are_the_tokens_one_place_further():
    inputs, targets = tokens().samples(0, 4)
    assert inputs.shape == (4, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_tokens_are_uniform_over_the_vocabulary():
    source = SyntheticTokens(sequence_length=999, vocabulary=10, seed=0)
    inputs, _ = source.samples(0, 100)
    counts = torch.bincount(inputs.flatten())
    assert len(counts) == 10
    # 99,900 draws: a count has mean 9,990 and standard deviation 95
    assert (counts - 9990).abs().max() < 5 * 95


def test_images_look_normalized_and_keep_their_labels():
    pictures, labels = images().samples(0, 200)
    assert pictures.shape == (200, 3, 16, 16)
    assert (pictures.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert abs(pictures.mean()) < 0.05
    assert abs(pictures.std() - 1) < 0.05
    assert labels.unique().tolist() == list(range(10))

    label_of = {}
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        assert label_of.setdefault(picture.numpy().tobytes(), label) == label
    assert len(label_of) == 24, "200 draws should meet every image of the pool"


def test_targets_of_vectors_follow_the_formula():
    inputs, targets = vectors().samples(0, 50)
    assert inputs.shape == (50, 5)
    assert targets.shape == (50, 7)
    assert inputs.dtype == targets.dtype == torch.float32
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert y == pytest.approx([x[j % 5] * (1 + x[(j + 1) % 5]) for j in range(7)], abs=1e-6)


def test_inputs_of_vectors_are_uniform_between_minus_one_and_one():
    inputs, _ = vectors().samples(0, 20_000)
    assert inputs.min() >= -1
    assert inputs.max() < 1
    assert abs(inputs.mean()) < 0.01
    assert inputs.std().item() == pytest.approx(1 / math.sqrt(3), abs=0.01)


def test_a_linear_model_learns_the_linear_part_of_the_vectors():
    inputs, targets = vectors().samples(0, 4096)
    fit = torch.linalg.lstsq(inputs, targets).solution
    left = (inputs @ fit - targets).square().mean().item()
    # of the variance 1/3 + 1/9 only the product's 1/9 is left
    assert targets.square().mean().item() == pytest.approx(4 / 9, abs=0.02)
    assert left == pytest.approx(1 / 9, abs=0.01)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (SyntheticTokens, ["sequence_length", "vocabulary", "seed"]),
        (SyntheticImages, ["image_size", "classes", "pool", "seed"]),
        (SyntheticVectors, ["inputs", "outputs", "seed"]),
    ],
)
def test_all_bad_options_are_reported_at_once(make, options):
    with pytest.raises(ConfigError) as caught:
        make(**dict.fromkeys(options, -1))
    assert [problem.option for problem in caught.value.problems] == options
