from functools import partial

import pytest
import torch

from ptdbench.models.resnet import ResNet
from ptdbench.models.toy import Toy
from ptdbench.parallel import strategy
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.options import Setting
from tests.parallel.made import on_meta


@pytest.mark.parametrize(("device", "timed"), [("cuda", [True, False, True]), ("cpu", [False, False, False])])
def test_cudnn_times_algorithms_for_convolutions_only(monkeypatch, device, timed):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen = []
    # What lays the model out is not needed, and would want a GPU.
    monkeypatch.setattr(strategy, "apply", lambda *_: seen.append(torch.backends.cudnn.benchmark))
    monkeypatch.setattr(strategy, "Accumulating", lambda *_, **__: None)
    mesh = {"tp": None, "cp": None}
    setting = Setting(mesh=mesh, layout=BatchPlan(Dims(), 4, 4), device=torch.device(device))  # type: ignore[arg-type]
    for build in (partial(ResNet, depth=18), Toy, partial(ResNet, depth=18)):
        strategy.Strategy()(on_meta(build), setting)
    assert seen == timed
