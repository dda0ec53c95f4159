"""Parameter groups for weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: weight decay applies to matrices and kernels, not to vectors.

    Biases and the scales of norms have one dimension. Decaying them does not make a model simpler (GPT-3, Brown
    et al. 2020, and He et al., "Bag of Tricks", 2019, section 3.1, omit them).
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
