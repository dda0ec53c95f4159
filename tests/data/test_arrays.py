import numpy as np
import pytest
import torch

from ptdbench.data.arrays import normalized, shifted

MEAN = (0.1, 0.5, 0.7)
STD = (0.2, 0.25, 0.5)


def pictures(count, height=6, width=5):
    """No pixel is black, so that the border can be told from the image, and none can be written to."""
    images = np.random.default_rng(0).integers(1, 256, (count, height, width, 3), dtype=np.uint8)
    images.setflags(write=False)
    return images


def places(before, after, padding):
    """By how much each image was moved and whether it was mirrored, found by trying everything."""
    height, width = before.shape[1:3]
    bordered = np.pad(before, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    shifts = []
    for source, result in zip(bordered, after, strict=True):
        (place,) = [
            (top, left, mirrored)
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
            for mirrored in (False, True)
            if (source[top : top + height, left : left + width][:, :: -1 if mirrored else 1] == result).all()
        ]
        shifts.append(place)
    return np.array(shifts)


def test_shifted_images_are_padded_crops_and_others_stay():
    images = pictures(900)
    after = shifted(images, seed=0, start=0, padding=1, flip=True)
    assert not (shifted(images, seed=1, start=0, padding=1, flip=True) == after).all()
    top, left, mirrored = places(images, after, 1).T
    counts = np.zeros((3, 3, 2))
    np.add.at(counts, (top, left, mirrored), 1)
    # 900 images in 18 places: a count has mean 50 and standard deviation 6.9
    assert abs(counts - 50).max() < 5 * 6.9
    images = pictures(100)
    assert not places(images, shifted(images, seed=0, start=0, padding=2, flip=False), 2)[:, 2].any()
    assert (shifted(images, seed=0, start=0, padding=0, flip=False) == images).all()


@pytest.mark.parametrize("channels_last", [True, False])
def test_normalization_equals_torchvisions(channels_last):
    from torchvision.transforms.v2.functional import normalize

    images = pictures(4).copy()
    ours = normalized(images, MEAN, STD, channels_last=channels_last)
    planes = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(ours, normalize(planes, list(MEAN), list(STD)), rtol=1e-6, atol=1e-6)
    assert ours.dtype == torch.float32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert ours.is_contiguous(memory_format=layout)
