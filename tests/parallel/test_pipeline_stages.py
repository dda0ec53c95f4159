import random
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.foreign import adapt
from ptdbench.models.resnet import ResNet
from ptdbench.parallel import pipeline_stages as stages
from ptdbench.parallel.pipeline_stages import Stage, balance
from ptdbench.setup import choices
from tests.conftest import read
from tests.parallel.made import small

untied = partial(small, tie_weights=False)


def cut(model, *ends: int) -> list[Stage]:
    names = list(model.parts())
    return [Stage(model, names[start:stop]) for start, stop in zip((0, *ends), (*ends, len(names)), strict=True)]


@pytest.mark.parametrize("build", [untied, lambda: ResNet(depth=18, classes=3, image_size=32)])
@pytest.mark.parametrize("ends", [(), (1,), (2, 4)])
def test_stages_keep_names_and_tensors(build, ends):
    model = build()
    of_stages = [item for stage in cut(model, *ends) for item in stage.state_dict(keep_vars=True).items()]
    whole = model.state_dict(keep_vars=True)
    assert [name for name, _ in of_stages] == list(whole)
    assert all(tensor is whole[name] for name, tensor in of_stages)


def test_stages_compute_the_model():
    model = untied()
    tokens, targets = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    first, second, last = cut(model, 1, 3)
    hidden = second(first(batch=(tokens, None)))
    batch = tokens, targets
    assert torch.equal(second(first(batch=batch), batch=batch), hidden)  # only the last one needs targets
    torch.testing.assert_close(last(hidden), model(tokens))
    loss = last(hidden, batch=batch)
    assert loss.shape == (1,)  # what a schedule can join
    torch.testing.assert_close(loss, model(tokens, targets).reshape(1))


class Across(nn.Linear):
    """Mixes positions, as a convolution over time does: gradients of its inputs have other strides than these."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.across, self.end = Across(4, 4), nn.Linear(3, 1)

    def parts(self) -> dict[str, nn.Module]:
        return {"across": self.across, "end": self.end}


def example() -> tuple[Tensor, Tensor]:
    return torch.empty(1, 4, 3, device="meta"), torch.empty(1, 4, 1, device="meta")


def test_gradients_that_go_back_are_contiguous():
    """By torch.autograd.grad, too, by which torch learns of their strides, and computes them under a split backward."""
    x = torch.randn(2, 4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Stage(adapt(Crossed(), example), ["module.across"])(x).square().sum(), x)
    assert gradient.is_contiguous()


def test_a_cut_says_which_rank_has_what():
    where = stages.split_stages(untied(), [0, 1, 0])
    assert [name for stage in where.stages for name in stage] == list(untied().parts())
    assert (where.stages_of(0), where.stages_of(1)) == ([0, 2], [1])
    assert where.owner("embedding.token.weight") == 0
    assert where.owner("head.norm.bias") == 2


@pytest.mark.parametrize(("costs", "ranks", "reason"), [
    ([97, 3], [0, 1], "stages 97 : 3 of the FLOPs, as 0 alone has 97%: at most 1.03"),
    ([0, 10, 0, 0, 90], [0, 1], "stages 10 : 90 of the FLOPs, as 4 alone has 90%: at most 1.11"),
    ([5, 70, 5, 6, 6, 8], [0, 1, 0, 1], "stages 16 : 84 of the FLOPs, as 1 alone has 70%: at most 1.19"),
    ([62, 38], [0, 1], None),  # 1.24 times the mean
    ([3, 3, 3], [0, 1], "stages 33 : 67 of the FLOPs, as the model has only 2 places to split it: at most 1.50"),
    ([31, 23, 23, 23], [0, 1, 2, 3], None),  # 1.24 times the mean of four
])  # fmt: skip
def test_imbalance_is_reported(costs, ranks, reason):
    parts = {str(number): nn.Linear(1, 1) for number in range(len(costs))}
    model: Any = SimpleNamespace(
        parts=lambda: parts, layers=list, train_flops=lambda: {str(number): cost for number, cost in enumerate(costs)}
    )
    remark = stages.imbalance(model, stages.split_stages(model, ranks))
    remedy = "parts() with shorter ones" if reason and "places" in reason else "fewer stages"
    assert remark == (reason and f"{reason} times as fast as one rank; try {remedy}, or parallel=fsdp")


@pytest.mark.parametrize(("name", "sizes"), [("toy", [2]), ("gpt_tiny", [2, 4]), ("resnet18", [2, 4])])
def test_the_stages_of_our_models_are_even(name, sizes):
    """By FLOPs, though one stage of two has 94 % of the weights of ResNet-18."""
    with torch.device("meta"):
        model = choices.build(read(f"model={name}"), "model")
    assert [stages.imbalance(model, stages.split_stages(model, range(size))) for size in sizes] == [None] * len(sizes)


def slowest(costs: list[float], cuts: list[range]) -> float:
    return max(sum(costs[part] for part in cut) for cut in cuts)


def all_cuts(parts: int, stages: int) -> list[list[range]]:
    return [
        [range(start, stop) for start, stop in zip((0, *inner), (*inner, parts), strict=True)]
        for inner in combinations(range(1, parts), stages - 1)
    ]


def test_no_other_cut_has_a_faster_slowest_stage():
    dice = random.Random(0)
    for _ in range(300):
        costs = [float(dice.choice((0, 1, 2, 3, 5, 8, 40))) for _ in range(dice.randint(1, 9))]
        stages = dice.randint(1, len(costs))
        cuts = balance(costs, stages)
        assert [part for cut in cuts for part in cut] == list(range(len(costs)))
        assert len(cuts) == stages
        assert all(cuts)
        possible = all_cuts(len(costs), stages)
        best = min(slowest(costs, other) for other in possible)
        assert slowest(costs, cuts) == best
        equal = [other for other in possible if slowest(costs, other) == best]
        assert len(cuts[0]) == min(len(other[0]) for other in equal)


def test_stages_have_weights_if_possible():
    assert balance([1, 0, 0, 1, 1], 3, empty=[1, 2]) == [range(1), range(1, 4), range(4, 5)]
    assert balance([1, 0, 0], 3, empty=[1, 2]) == [range(1), range(1, 2), range(2, 3)]
    with torch.device("meta"):
        model = ResNet(depth=50, classes=10)
    parts = model.parts()
    for names in stages.split_stages(model, range(15)).stages:
        assert any(True for name in names for _ in parts[name].parameters())


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_parts_cannot_be(stages):
    with pytest.raises(ValueError, match=f"cannot split 3 parts into {stages} stages"):
        balance([1, 1, 1], stages)
