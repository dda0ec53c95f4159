import math

import pytest
import torch

from ptdbench.data.synthetic import SyntheticImages, SyntheticTokens, SyntheticVectors


def test_tokens_are_uniform_and_targets_shifted():
    inputs, targets = SyntheticTokens(sequence_length=999, vocabulary=10, seed=0).samples(0, 100)
    assert (inputs.shape, inputs.dtype) == ((100, 999), torch.int64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    counts = torch.bincount(inputs.flatten())
    assert len(counts) == 10
    # 99,900 draws: a count has mean 9,990 and standard deviation 95
    assert (counts - 9990).abs().max() < 5 * 95


def test_images_are_normalized_and_labeled():
    pictures, labels = SyntheticImages(image_size=16, classes=10, seed=0, pool=24).samples(0, 200)
    assert (pictures.shape, pictures.dtype, labels.dtype) == ((200, 3, 16, 16), torch.float32, torch.int64)
    assert abs(pictures.mean()) < 0.05
    assert abs(pictures.std() - 1) < 0.05
    assert labels.unique().tolist() == list(range(10))
    label_of = {}
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        assert label_of.setdefault(picture.numpy().tobytes(), label) == label
    assert len(label_of) == 24, "200 draws should meet every image of the pool"


def test_vectors_follow_the_formula():
    inputs, targets = SyntheticVectors(inputs=5, outputs=7, seed=0).samples(0, 20_000)
    assert (inputs.shape, targets.shape) == ((20_000, 5), (20_000, 7))
    assert inputs.dtype == targets.dtype == torch.float32
    for x, y in zip(inputs[:50].tolist(), targets[:50].tolist(), strict=True):
        assert y == pytest.approx([x[j % 5] * (1 + x[(j + 1) % 5]) for j in range(7)], abs=1e-6)
    assert inputs.min() >= -1
    assert inputs.max() < 1
    assert abs(inputs.mean()) < 0.01
    assert inputs.std().item() == pytest.approx(1 / math.sqrt(3), abs=0.01)
