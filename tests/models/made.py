"""Small models with weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision.models.resnet import BasicBlock, Bottleneck

from ptdbench.models.materialize import materialize
from ptdbench.models.resnet import SHAPES, ResNet


def filled(family: Callable[..., Any], **options: Any) -> Any:
    """A model on the CPU, with the initial values of seed 0."""
    with torch.device("meta"):
        model = family(**options)
    materialize(model, model, device="cpu", seed=0)
    return model


def small_resnet(block: type[BasicBlock | Bottleneck] = BasicBlock, **options: Any) -> ResNet:
    """Of one block a stage, or a CPU takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, 10, (block, [1, 1, 1, 1]))
        model: ResNet = filled(ResNet, depth=10, **options)
    return model
