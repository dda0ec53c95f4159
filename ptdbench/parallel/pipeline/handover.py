"""Sending tensors of unknown shape and dtype between ranks, for evaluation.

By hand: ``PipelineStage``, which training uses, infers shapes too, but once, in its first pass, and receives into
buffers of these shapes from then on. The last batch of an evaluation is smaller.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

#: The dtypes that a stage may send, encoded by their index.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_MOST_DIMENSIONS = 8


def send(tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
    """Send a tensor, preceded by its shape and dtype.

    Args:
        tensor: Of at most eight dimensions.
        group: A group of both ranks.
        to: The receiver's rank in the group.
    """
    header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header += [0] * (2 + _MOST_DIMENSIONS - len(header))
    dist.send(torch.tensor(header, device=tensor.device), group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive(group: dist.ProcessGroup, origin: int, device: torch.device) -> Tensor:
    """Receive the tensor that rank ``origin`` of the group sends, on ``device``."""
    header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=origin)
    dtype, dimensions, *shape = header.tolist()
    tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, group=group, group_src=origin)
    return tensor
