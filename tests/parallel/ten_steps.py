"""Ten steps on four samples: what the numbers of a layout are held to."""

import torch
from torch import Tensor

SAMPLES, STEPS = 4, 10


def tokens(batch: int = 2, first: int = 0) -> Tensor:
    """``[batch, 6]`` of a vocabulary of 20."""
    return (torch.arange(batch * 6).reshape(batch, 6) * 7 + first) % 20
