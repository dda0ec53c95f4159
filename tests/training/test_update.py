"""Updates of weights that are not where the model computes."""

from __future__ import annotations

import torch
from torch import nn

from ptdbench.optim.schedules import Constant
from ptdbench.parallel.engine import Engine
from ptdbench.setup.config import Train
from ptdbench.training.update import Update
from tests.workloads.made_loop import TRAIN


class Nothing(Engine):
    """An engine without weights."""

    def gradients(self, *_): ...
    def gradient_norm(self): ...
    def outputs(self, *_): ...


def test_the_loss_scale_of_offloaded_weights_is_where_they_are():
    """Copied to them asynchronously it would be read before it is there."""
    device = torch.device("meta")
    for weight in (nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device=device))):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        update = Update(Nothing(), optimizer, Constant(), Train(**TRAIN), device, scale=True)
        assert update.scale(torch.ones((), device=weight.device)).device == weight.device
        assert update._scaler._scale.device == weight.device
