import math

import pytest
import torch
import torchvision

from ptdbench.models.resnet import ResNet
from ptdbench.problems import ConfigError
from tests.daily import cases
from tests.models.made import filled, small_resnet


@cases("depth", [18, 50], daily=[18])
def test_logits_equal_torchvisions(depth):
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=10)
    ours = filled(ResNet, depth=depth, classes=10, image_size=64)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))  # batch statistics
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))  # running statistics


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_tensors_and_blocks_are_torchvisions(depth):
    with torch.device("meta"):
        ours, theirs = ResNet(depth=depth), getattr(torchvision.models, f"resnet{depth}")()
    shapes = [{name: t.shape for name, t in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert len(ours.layers()) == sum(len(getattr(theirs, f"layer{i}")) for i in (1, 2, 3, 4))


def test_initial_values_equal_torchvisions():
    torch.manual_seed(0)
    theirs, ours = torchvision.models.resnet18().state_dict(), filled(ResNet, depth=18).state_dict()
    for name, want in theirs.items():
        got = ours[name]
        assert got.dtype == want.dtype
        if want.unique().numel() > 1:
            tolerance = 6 / math.sqrt(want.numel())  # more than 4 standard errors of a ratio of two deviations
            assert got.std().item() == pytest.approx(want.std().item(), rel=tolerance), name
            assert got.abs().max().item() < 1.5 * want.abs().max().item(), name
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_first_blocks_see_every_pixel():
    model = small_resnet(classes=10, image_size=8, stem="small")
    sizes = []
    for layer in model.layers():
        layer.register_forward_hook(lambda _, __, outputs: sizes.append(outputs.shape[-1]))
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert sizes == [8, 4, 2, 1]
    with pytest.raises(ConfigError, match="image_size=8"):
        small_resnet(image_size=8)


def test_label_smoothing_in_training_only():
    images, targets = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    model = small_resnet(classes=4, image_size=8, stem="small", label_smoothing=0.2)
    log_p = model(images).log_softmax(1)
    torch.testing.assert_close(model(images, targets), -(0.8 * log_p.diagonal() + 0.2 * log_p.mean(1)).mean())
    model.eval()
    torch.testing.assert_close(model(images, targets), -model(images).log_softmax(1).diagonal().mean())
    for smoothing in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="label_smoothing"):
            small_resnet(label_smoothing=smoothing)
