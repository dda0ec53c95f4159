"""Small models with weights, and what they must have in common with those of Hugging Face."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from ptdbench.models.materialize import materialize, parameter_count
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


def check_logits(
    ours: nn.Module, theirs: nn.Module, weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
) -> None:
    """With their weights, which ``weights`` gives our names, ours has their logits of sequences of 20 of 60 tokens."""
    with torch.no_grad():
        for parameter in theirs.parameters():  # at the initial values biases and norms would hide mistakes
            parameter.add_(0.2 * torch.randn_like(parameter))
    missing, unexpected = ours.load_state_dict(weights(theirs.state_dict()), strict=False)
    assert not [name for name in missing if not name.endswith(("router.load", "router.bias"))]
    assert not unexpected
    tokens = torch.randint(60, (3, 20))
    expected = theirs.eval()(tokens).logits
    assert expected.std() > 0.1
    assert (ours(tokens) - expected).abs().max() / expected.abs().max() < 1e-5
    assert parameter_count(ours) == parameter_count(theirs)
