from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ptdbench.models.materialise import materialise
from ptdbench.models.toy import Toy
from ptdbench.parallel.engine import Accumulating


def toy() -> Toy:
    with torch.device("meta"):
        model = Toy(inputs=4, width=6, outputs=2, layers=3)
    materialise(model, model, device="cpu", seed=0)
    return model


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 12])
def test_gradients_and_loss_are_those_of_the_whole_batch(micro_batch):
    inputs, targets = torch.randn(12, 4), torch.randn(12, 2)
    whole, split = toy(), toy()
    expected = whole(inputs, targets)
    expected.backward()
    loss = Accumulating(split, micro_batch).gradients(inputs, targets, lambda loss: loss)
    torch.testing.assert_close(loss, expected.detach())
    assert loss.dtype == torch.float32
    assert not loss.requires_grad
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_scale_reaches_the_gradients_and_not_the_loss():
    inputs, targets = torch.randn(4, 4), torch.randn(4, 2)
    plain, scaled = toy(), toy()
    loss = Accumulating(plain, 2).gradients(inputs, targets, lambda loss: loss)
    assert torch.equal(Accumulating(scaled, 2).gradients(inputs, targets, lambda loss: loss * 1024), loss)
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad * 1024)


def test_each_pass_is_told_whether_it_is_the_last_for_forward_and_backward():
    told, model = [], toy()

    @contextmanager
    def bracket(last: bool) -> Iterator[None]:
        told.append(("begin", last))
        yield
        told.append(("end", last))

    model.register_forward_hook(lambda *_: told.append("forward"))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: told.append("backward"))
    Accumulating(model, 2, bracket).gradients(torch.randn(6, 4), torch.randn(6, 2), lambda loss: loss)
    passes = [[("begin", last), "forward", "backward", ("end", last)] for last in (False, False, True)]
    assert told == [event for one in passes for event in one]
