"""Weights that a forward pass changes in place, however it does so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ptdbench.models.foreign import adapt
from ptdbench.models.written import written_weights


class Momentum(nn.Module):
    """Changes a frozen weight by a trained one in training, and the statistics of a batch norm."""

    def __init__(self, follow: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.follow = follow
        self.fast, self.slow = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.follow(self.slow.weight, self.fast.weight)
        return self.norm(self.fast(inputs)) + self.slow(inputs)


def replace(slow: Tensor, fast: Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


def follow_if_finite(slow: Tensor, fast: Tensor) -> None:
    if fast.isfinite().all():  # a value, which the meta device has not
        slow.lerp_(fast, 0.1)


@pytest.mark.parametrize(
    ("follow", "is_told"),
    {
        "reads": (lambda slow, fast: slow + fast, False),
        "in place": (lambda slow, fast: slow.lerp_(fast, 0.1), True),
        "data": (lambda slow, fast: slow.data.mul_(0.9).add_(fast.data, alpha=0.1), True),
        "other data": (replace, True),
        "several": (lambda slow, fast: torch._foreach_lerp_([slow], [fast], 0.1), True),
        "out": (lambda slow, fast: torch.add(slow, fast, out=slow), True),
        "a row": (lambda slow, fast: slow[0].copy_(fast[0]), True),
        "by value": (follow_if_finite, True),
    }.values(),
)
def test_a_weight_that_the_forward_pass_changes_is_named_and_stays_as_it_is(follow, is_told):
    module = Momentum(follow).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def example() -> tuple[Tensor, Tensor]:
        return torch.empty(1, 3, device="meta"), torch.empty(1, 3, device="meta")

    assert written_weights(adapt(module, example), *example()) == ["module.slow.weight"] * is_told
    assert not module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
