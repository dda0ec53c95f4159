"""Weights without dimensions, such as CLIP's ``logit_scale``, which FSDP cannot shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ptdbench.models.trial import trial
from ptdbench.nested import with_samples


def widen(module: nn.Module, example: Callable[[], tuple[Any, Tensor]]) -> None:
    """Give weights without dimensions the shape ``(1,)``, under every layout, if the loss does not depend on it.

    They stay as they are if the loss of two samples differs, as where several are stacked, or if it cannot be computed.

    Args:
        module: Called as ``module(inputs, targets)``.
        example: Inputs and targets of one sample on the meta device.
    """
    weights = dict(module.named_parameters(remove_duplicate=False))
    scalars = {name: weight for name, weight in weights.items() if not weight.dim()}
    if not scalars or any(weight.is_meta for weight in weights.values()):
        return
    wide = {weight: nn.Parameter(weight.detach().view(1), weight.requires_grad) for weight in scalars.values()}
    try:
        before = _loss(module, example())
        _replace(module, {name: wide[weight] for name, weight in scalars.items()})
        is_same = torch.equal(before, _loss(module, example()))
    except Exception:  # third-party code may raise anything
        is_same = False
    if not is_same:
        _replace(module, scalars)


def _replace(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = weight


def _loss(module: nn.Module, example: tuple[Any, Tensor]) -> Tensor:
    """Return the loss of two samples, with distinct values of weights of one element."""
    with trial(module):
        for number, weight in enumerate(weight for weight in module.parameters() if weight.numel() == 1):
            weight.fill_(0.3 + 0.1 * number)
        loss: Tensor = module(*with_samples(example, 2, "cpu", filled=True))
    return loss
