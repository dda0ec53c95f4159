import math

import pytest
import torch

from ptdbench.models.materialize import parameter_count
from ptdbench.models.toy import Toy
from tests.models.made import filled


def test_layers_have_relu_between_and_begin_as_linear_layers():
    model, x = filled(Toy, inputs=6, width=5, outputs=4, layers=3), torch.randn(7, 6)
    weights = list(model.parameters())
    hidden = (x @ weights[0].T + weights[1]).clamp(min=0)
    hidden = (hidden @ weights[2].T + weights[3]).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ weights[4].T + weights[5])
    assert parameter_count(model) == (6 * 5 + 5) + (5 * 5 + 5) + (5 * 4 + 4)
    for parameter in filled(Toy, inputs=64, width=64, outputs=64, layers=3).parameters():
        assert parameter.abs().max() <= 1 / 8
        assert parameter.std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.25)
