from collections.abc import Iterator

import pytest
import torch

from ptdbench.models.resnet import ResNet
from ptdbench.models.toy import Toy
from ptdbench.parallel import strategy
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.strategy import choose_convolutions

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def test_algorithms_are_timed_for_a_model_with_convolutions_and_for_the_next_only_if_it_has_some(monkeypatch):
    with torch.device("meta"):
        models = (ResNet(depth=18, image_size=32), Toy(), ResNet(depth=18, image_size=32))
    found = []
    # What lays the model out is not needed, and would want a GPU.
    monkeypatch.setattr(strategy, "apply", lambda *_: found.append(torch.backends.cudnn.benchmark))
    monkeypatch.setattr(strategy, "Accumulating", lambda *_, **__: None)
    mesh = {"tensor": None, "context": None}
    for model in models:
        layout = BatchPlan(Dims(), 4, 4)
        strategy.Strategy()(model, Setting(mesh=mesh, layout=layout, device=GPU))  # type: ignore[arg-type]
    assert found == [True, False, True]


def test_on_a_cpu_there_is_nothing_to_choose():
    torch.backends.cudnn.benchmark = False
    choose_convolutions(torch.nn.Conv2d(1, 1, 1), torch.device("cpu"))
    assert torch.backends.cudnn.benchmark is False
