from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ptdbench.models.gpt import GPT
from ptdbench.parallel.pipeline.pipelined import arriving, receive_tensor, send_tensor
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


def test_what_arrives_is_known_where_a_tied_weight_is_on_the_device_already():
    """The last stage has the embedding's weight for its head, and nothing else of the first one."""
    with torch.device("meta"):
        model = GPT(layers=2, heads=2, width=8, sequence_length=6, vocabulary=20, tie_weights=True)
    embedding, *_ = (model.parts() or {}).values()
    embedding.token.weight = nn.Parameter(torch.zeros(20, 8))
    found = arriving(model, list(model.parts() or {})[:2], torch.zeros(3, 6, dtype=torch.long), torch.bfloat16, 2)
    assert (found.shape, found.dtype, found.device.type) == ((3, 3, 8), torch.bfloat16, "meta")
