"""The image of the phases."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from ptdbench.report.phases import PHASES
from ptdbench.report.phases_picture import COLORS, bars, draw
from tests.report.made import DDP, PDP, phased


def area(picture: bytes, phase: str) -> int:
    """Pixels of the color of a phase."""
    pixels = np.asarray(Image.open(BytesIO(picture)).convert("RGB"))
    color = [int(COLORS[phase][place : place + 2], 16) for place in (1, 3, 5)]
    return int((pixels == color).all(axis=2).sum())


def test_a_bar_for_the_mean_and_for_each_rank():
    found = bars(PDP["phases"])
    assert list(found) == ["mean", "rank 0 (stage 0)", "rank 1 (stage 1)"]
    assert dict(zip(PHASES, found["mean"], strict=True))["bubble"] == pytest.approx(24)
    assert [sum(row) for row in found.values()] == pytest.approx([100, 100, 100])


def test_a_single_rank_is_its_mean():
    assert list(bars(phased("single", 50, {"forward": [20], "backward": [30]})["phases"])) == ["rank 0"]


def test_of_many_ranks_the_slowest_and_the_fastest_are_drawn():
    many = phased("ddp", 90, {"forward": [30.0 + rank for rank in range(40)], "backward": [20] * 40})["phases"]
    assert list(bars(many)) == ["mean", "slowest: rank 39", "fastest: rank 0"]


def test_a_longer_phase_is_a_larger_area_of_its_color():
    picture = draw(PDP["phases"])
    width, height = Image.open(BytesIO(picture)).size
    assert width > 2 * height > 400
    forward, backward, bubble = (area(picture, phase) for phase in ("forward", "backward", "bubble"))
    assert backward > forward > 0
    assert bubble > 3 * area(draw(DDP["phases"]), "bubble")  # there it is in the legend only


def test_areas_are_in_proportion():
    """A bar is as long as the plot; 100 ms are three bars of it."""
    found, alone = PDP["phases"], phased("ddp", 100, {"forward": [50, 50], "backward": [50, 50]})["phases"]
    forward, backward = (area(draw(alone), phase) for phase in ("forward", "backward"))
    assert forward == pytest.approx(backward, rel=0.05)
    assert area(draw(found), "forward") == pytest.approx(forward / 2, rel=0.1)


@pytest.mark.parametrize("milliseconds", [0, 1e-3, 0.37, 12_345, 1e6])
def test_steps_of_any_length_are_drawn(milliseconds):
    phases = phased("ddp", 76, {"forward": [milliseconds], "backward": [0]})["phases"]
    assert area(draw(phases), "forward") > (10_000 if milliseconds else 0)


def test_every_phase_has_a_color_of_its_own():
    assert list(COLORS) == list(PHASES)
    assert len(set(COLORS.values())) == len(PHASES)
