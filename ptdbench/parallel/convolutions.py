"""How convolutions are computed on a GPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd


def choose_convolutions(module: nn.Module, device: torch.device) -> None:
    """Let cuDNN, or MIOpen on AMD's GPUs, time its algorithms for each shape and keep the fastest.

    Worth it as a run has few shapes: those of training, of evaluation and of its last batch. Only for a model with
    convolutions: others have nothing to choose.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = any(isinstance(one, _ConvNd) for one in module.modules())
