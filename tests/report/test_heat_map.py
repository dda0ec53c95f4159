"""The heat map of ``workload=p2p``."""

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from ptdbench.report.heat_map import cells, draw


def pair(source, target, **figures):
    return {
        "source": source,
        "target": target,
        "latency": 1e-5,
        "bandwidth": 1e9,
        "sizes": [{"bytes": 2**20}],
    } | figures


def test_rows_are_sources_and_columns_targets():
    p2p = {"pairs": [pair(0, 2, bandwidth=5e9), pair(2, 0, bandwidth=None)]}
    found = cells(p2p, "bandwidth", 3)
    assert found.shape == (3, 3)
    assert found[0, 2] == 5e9
    assert sum(math.isfinite(cell) for cell in found.flatten().tolist()) == 1


def pixels(p2p, ranks):
    picture = Image.open(BytesIO(draw(p2p, ranks))).convert("RGB")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


@pytest.mark.parametrize("ranks", [2, 20])
def test_a_slow_pair_changes_the_image(ranks):
    pairs = [pair(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    even = pixels({"pairs": pairs}, ranks)
    uneven = pixels({"pairs": [pairs[0] | {"bandwidth": 1e8}, *pairs[1:]]}, ranks)
    assert even.shape == uneven.shape
    assert even.shape[2] > even.shape[1] > 100
    assert not torch.equal(even, uneven)


def test_nothing_measured_is_an_empty_image():
    nothing = {"pairs": [pair(0, 1, latency=None, bandwidth=None, sizes=[])]}
    assert pixels(nothing, 2).shape == pixels({"pairs": [pair(0, 1)]}, 2).shape
