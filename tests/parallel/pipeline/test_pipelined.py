import pytest
import torch
import torch.distributed as dist

from ptdbench.models.gpt import GPT
from ptdbench.models.protocol import module_of
from ptdbench.parallel.pipeline.pipelined import arriving, receive_tensor, send_tensor, without_weights
from ptdbench.parallel.precision import Copies
from tests.parallel.ranks import on_ranks

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


@pytest.mark.ranks
def test_what_arrives_is_what_was_sent():
    assert on_ranks(2, hand_over)[1] == [True] * len(TENSORS)


def test_what_arrives_from_an_absent_rank_is_foreseen_whatever_becomes_of_own_stages():
    """An earlier one computes with copies of its weights, and the last one's head, which is the embedding, has some."""
    with torch.device("meta"):
        model = GPT(layers=2, heads=2, width=8, sequence_length=6, vocabulary=20, tie_weights=True)
    whole = without_weights(model)
    head = model.parts()["head"].to_empty(device="cpu")
    module_of(model).get_submodule("embedding.token").weight = head.projection.weight
    Copies(model.parts()["blocks.0"], [], torch.bfloat16).begin()
    found = arriving(whole, ["embedding", "blocks.0"], torch.zeros(4, 6, dtype=torch.int64), torch.bfloat16, shares=1)
    assert (found.shape, found.dtype, found.device.type) == ((4, 6, 8), torch.bfloat16, "meta")


def test_a_copy_without_weights_leaves_them_to_the_model():
    model = GPT(layers=1, heads=2, width=8, sequence_length=6, vocabulary=20, tie_weights=True)
    copied = module_of(without_weights(model))
    assert {name: one.shape for name, one in copied.named_parameters()} == {
        name: one.shape for name, one in module_of(model).named_parameters()
    }
    assert {one.device.type for one in copied.parameters()} == {"meta"}
    assert {one.device.type for one in module_of(model).parameters()} == {"cpu"}
