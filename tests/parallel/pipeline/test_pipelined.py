from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ptdbench.parallel.pipeline.pipelined import receive_tensor, send_tensor
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.ranks

TENSORS = {
    "scalar": torch.tensor(3.0),
    "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "tokens": torch.arange(5),
    "nothing": torch.empty(0, 4),
}


def hand_over() -> bool:
    group = dist.group.WORLD
    same = []
    for tensor in TENSORS.values():
        if dist.get_rank() == 0:
            send_tensor(tensor, group, 1)
        else:
            found = receive_tensor(group, 0, torch.device("cpu"))
            same.append(found.dtype == tensor.dtype and torch.equal(found, tensor))
    return same


def test_what_arrives_is_what_was_sent():
    assert on_ranks(2, hand_over)[1] == [True] * len(TENSORS)
