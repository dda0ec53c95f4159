"""Small models with weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchvision.models.resnet import BasicBlock, Bottleneck

from ptdbench.models.materialize import materialize
from ptdbench.models.resnet import SHAPES, ResNet


def on_meta(build: Callable[..., Any], **options: Any) -> Any:
    with torch.device("meta"):
        return build(**options)


def with_weights(model: Any) -> Any:
    """The model on the CPU, with the initial values of seed 0, which ranks draw too."""
    materialize(model, model, device="cpu", seed=0)
    return model


def filled(family: Callable[..., Any], **options: Any) -> Any:
    return with_weights(on_meta(family, **options))


def small_resnet(block: type[BasicBlock | Bottleneck] = BasicBlock, **options: Any) -> ResNet:
    """Of one block a stage, or a CPU takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, 10, (block, [1, 1, 1, 1]))
        model: ResNet = filled(ResNet, depth=10, **options)
    return model
