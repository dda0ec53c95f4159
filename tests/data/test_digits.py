from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from ptdbench.data.digits import Digits
from tests.data.made import problem_of, problems_of

EPOCH = 1797 - 360


def grey(images):
    """Back to the values of scikit-learn, 0 to 16, one for each pixel."""
    values = (images * 0.3760 + 0.3053) * 16
    assert torch.allclose(values, values.round(), atol=0.04), "every value is one of 17"
    assert (values[:, :1] == values).all(), "three equal channels"
    return values[:, 0].round().to(torch.uint8).contiguous().numpy()


def sorted_pairs(images, labels):
    return sorted((image.astype(np.uint8).tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def test_parts_are_all_images_of_scikit_learn():
    data = Digits(seed=0, shift=0)
    images, labels = data.samples(0, EPOCH)
    held_images, held_labels = data.held_out.samples(0, 360)
    original = sorted_pairs(load_digits().images, load_digits().target)
    assert len(data.held_out) == 360
    assert sorted_pairs(np.concatenate([grey(images), grey(held_images)]), torch.cat([labels, held_labels])) == original
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    data = Digits(seed=0, held_out=0, shift=0)  # nothing need be held out
    data.prepare()
    assert data.held_out is None
    images, labels = data.samples(0, 1797)
    assert sorted_pairs(grey(images), labels) == original


def test_images_shift_every_epoch_unmirrored():
    data = Digits(seed=0)
    images, labels = data.samples(0, 3 * EPOCH)
    plain, plain_labels = Digits(seed=0, shift=0).samples(0, 3 * EPOCH)
    assert torch.equal(labels, plain_labels)
    unchanged = (grey(images) == grey(plain)).all(axis=(1, 2)).mean()
    assert 1 / 9 - 0.05 < unchanged < 1 / 9 + 0.05
    bordered = np.pad(grey(plain), ((0, 0), (1, 1), (1, 1)))
    crops = np.stack([bordered[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)])
    assert (crops == grey(images)).all(axis=(2, 3)).any(axis=0).all()
    assert len(np.unique(grey(images), axis=0)) > EPOCH * 2


def test_held_out_part_is_stratified():
    wanted = torch.from_numpy(np.bincount(load_digits().target)) * 360 / 1797
    labels = Digits(seed=0).held_out.samples(0, 360)[1]
    assert (torch.bincount(labels) - wanted).abs().max() < 1
    for least_or_most in (10, 1787):
        held_out = Digits(seed=0, held_out=least_or_most).held_out
        assert len(held_out) == least_or_most
        assert len(held_out.samples(0, least_or_most)[1].unique()) == 10


def test_identity_covers_images_and_split(monkeypatch):
    before = Digits(seed=0).identity
    assert before == Digits(seed=5, shift=0).identity
    assert len({before} | {Digits(seed=0, held_out=held_out).identity for held_out in (0, 10, 360)}) == 3
    pixel, label = load_digits(), load_digits()
    pixel.images[5, 3, 3] += 1
    label.target[[5, 6]] = label.target[[6, 5]]  # so that the division stays
    for changed in (pixel, label):
        monkeypatch.setattr("sklearn.datasets.load_digits", lambda changed=changed: changed)
        assert Digits(seed=0).identity != before


def test_wrong_model_options_name_the_right_ones():
    problems = problems_of(Digits, seed=0, classes=1000, image_size=224)
    assert str(problems[0]).startswith("classes=1000: comes from the model, and must be 10, as in these images; try")
    assert [problem.remedy for problem in problems] == ["try model.classes=10", "try model.image_size=8"]


@pytest.mark.parametrize("held_out", [1, 9, 1788, 1797, 0.2, True])
def test_every_digit_is_in_both_parts(held_out):
    assert "10 to 1787 of the 1797" in str(problem_of(Digits, seed=0, held_out=held_out))


def test_the_images_are_read_once(monkeypatch):
    with mock.patch("sklearn.datasets.load_digits", wraps=load_digits) as read:
        data = Digits(seed=0)
        data.example()
        assert read.call_count == 0, "a constructor is light"
        for start in range(0, 64, 8):
            data.samples(start, start + 8)
        _ = data.held_out, data.identity
        assert read.call_count == 1
