import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptdbench.kernels.copies import Copies
from ptdbench.models.gpt import GPT
from ptdbench.models.protocol import module_of
from ptdbench.parallel import pipeline_stages as stages
from ptdbench.parallel.pipeline_engine import arriving, receive_tensors, send_tensors, without_weights
from tests.parallel.ranks import on_ranks

TENSORS = {
    "scalar": torch.tensor(3.0),
    "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "tokens": torch.arange(5),
    "nothing": torch.empty(0, 4),
}


@pytest.fixture(scope="module")
def of_ranks() -> list[tuple[list[Tensor], list[Tensor]]]:
    return on_ranks(3, in_rank)


def in_rank() -> tuple[list[Tensor], list[Tensor]]:
    return handed_over(), gradients_of_a_shared_weight()


def handed_over() -> list[Tensor]:
    group, rank = dist.group.WORLD, dist.get_rank()
    if rank == 0:
        send_tensors([*TENSORS.values()], group, 1)
    return receive_tensors(group, 0, torch.device("cpu")) if rank == 1 else []


@pytest.mark.ranks
def test_received_equals_sent(of_ranks):
    for received, tensor in zip(of_ranks[1][0], TENSORS.values(), strict=True):
        assert received.dtype == tensor.dtype
        assert torch.equal(received, tensor)


def gradients_of_a_shared_weight() -> list[Tensor]:
    """In each of three ranks: the sums that copies of a weight have, which is in four stages and twice in one."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    for part in model:
        part.weight = model[0].weight
    tied = [("0.weight", f"{part}.weight") for part in range(1, 5)]
    names = [["0"], ["1"], ["2", "3"], ["4"]]
    where = stages.StageSplit(names, [0, 1, 2, 0], names)
    stages.untie(model, tied, where)
    rank = dist.get_rank()
    here = nn.ModuleDict(
        {name: model.get_submodule(name) for number in where.stages_of(rank) for name in names[number]}
    )
    for number, copy in enumerate(here.parameters()):
        copy.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(3 * number + rank))
    shared = stages.find_shared(tied, here, where, dist.group.WORLD)
    assert [weight.first is None for weight in shared] == [rank > 0]
    stages.add_up_shared(shared, dist.group.WORLD)
    assert stages.find_shared(tied, here.requires_grad_(False), where, dist.group.WORLD) == []  # no gradients
    return [copy.grad for copy in here.parameters()]


@pytest.mark.ranks
def test_shared_weight_sums_its_gradients(of_ranks):
    gradients_of = [gradients for _, gradients in of_ranks]
    assert [len(copies) for copies in gradients_of] == [2, 1, 1]
    expected = sum(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    torch.testing.assert_close(gradients_of[0][0], expected)
    assert all(torch.equal(copy, gradients_of[0][0]) for copies in gradients_of for copy in copies)


def test_shape_from_absent_rank_is_predicted():
    """An earlier one computes with copies of its weights, and the last one's head, which is the embedding, has some."""
    with torch.device("meta"):
        model = GPT(layers=2, heads=2, width=8, sequence_length=6, vocabulary=20, tie_weights=True)
    whole = without_weights(model)
    head = model.parts()["head"].to_empty(device="cpu")
    module_of(model).get_submodule("embedding.token").weight = head.projection.weight
    Copies(model.parts()["blocks.0"], [], torch.bfloat16).begin()
    (predicted,) = arriving(
        whole, ["embedding", "blocks.0"], torch.zeros(4, 6, dtype=torch.int64), torch.bfloat16, shares=1
    )
    assert (predicted.shape, predicted.dtype, predicted.device.type) == ((4, 6, 8), torch.bfloat16, "meta")


def test_meta_copy_leaves_the_model():
    model = GPT(layers=1, heads=2, width=8, sequence_length=6, vocabulary=20, tie_weights=True)
    copied = module_of(without_weights(model))
    assert {name: weight.shape for name, weight in copied.named_parameters()} == {
        name: weight.shape for name, weight in module_of(model).named_parameters()
    }
    assert {weight.device.type for weight in copied.parameters()} == {"meta"}
    assert {weight.device.type for weight in module_of(model).parameters()} == {"cpu"}
