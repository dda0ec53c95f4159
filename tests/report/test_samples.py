from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from ptdbench.report import samples


def drawn(images: torch.Tensor) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(samples.draw(images))))


def test_small_images_are_drawn_large_side_by_side_with_their_channels_last_or_not():
    black, white = torch.full((3, 8, 8), -2.0), torch.full((3, 8, 8), 3.0)
    images = torch.stack([black, white])
    picture = drawn(images)
    assert picture.shape == (64 + 2 * 2, 2 * (64 + 2) + 2, 3)  # a border of two pixels around each
    assert picture[34, 34].tolist() == [0, 0, 0]
    assert picture[34, 34 + 66].tolist() == [255, 255, 255]
    assert np.array_equal(drawn(images.to(memory_format=torch.channels_last)), picture)


def test_large_images_keep_their_size():
    assert drawn(torch.rand(1, 3, 100, 100)).shape[:2] == (100, 100)
