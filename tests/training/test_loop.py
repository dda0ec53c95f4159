"""The step loop against the few lines that anybody would write by hand."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptdbench.data.synthetic import SyntheticVectors
from ptdbench.models.materialize import materialize
from ptdbench.models.toy import Toy
from ptdbench.optim.schedules import Constant
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.engine import Accumulating, Engine, LaidOutModule
from ptdbench.setup.config import Train
from ptdbench.training import loop as module
from ptdbench.training.loop import StepLoop, Update
from tests.workloads.made_loop import TRAIN, step_loop


class Nothing(Engine):
    def gradients(self, *_): ...
    def gradient_norm(self): ...
    def outputs(self, *_): ...


def test_the_loss_scale_of_offloaded_weights_is_where_they_are():
    """Copied to them asynchronously it would be read before it is there."""
    device = torch.device("meta")
    for weight in (nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device=device))):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        update = Update(Nothing(), optimizer, Constant(), Train(**TRAIN), device, scale=True)
        assert update.scale(torch.ones((), device=weight.device)).device == weight.device
        assert update.scaler._scale.device == weight.device


CPU = torch.device("cpu")


def toy() -> Toy:
    with torch.device("meta"):
        model = Toy(inputs=6, width=8, outputs=4, layers=3)
    materialize(model, model, device="cpu", seed=0)
    return model


def data() -> SyntheticVectors:
    return SyntheticVectors(inputs=6, outputs=4, seed=0)


def test_readers_of_weights_are_notified_before_updates():
    model, told = toy(), list[Tensor]()

    def weights() -> Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    loop = loop_over(model)
    loop.update.before_change = lambda: told.append(weights())
    before = [weights()]
    for _ in range(2):
        loop.step()
        before.append(weights())
    assert [torch.equal(*pair) for pair in zip(told, before, strict=False)] == [True] * 2


def test_a_gpu_that_has_steps_to_do_waits_for_no_batch(monkeypatch):
    loop = loop_over(toy())
    for finished in (0, 0, 2, 2):
        monkeypatch.setattr(loop.clock, "finished", lambda count=finished: count)
        loop.step()
    assert [seconds > 0 for seconds in loop.feed.wait_seconds] == [True, False, True, False]


def loop_over(model: Toy, micro_batch: int = 8, **train: Any) -> StepLoop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    where = BatchPlan(Dims(), 8, micro_batch, 1, 8 // micro_batch)
    return step_loop(Accumulating(LaidOutModule(model, model), micro_batch), optimizer, data(), where, **train)


def by_hand(steps: int, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of plain training on samples 0, 1, 2, ..."""
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = model(*data().samples(step * batch, (step + 1) * batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters())


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_it_trains_as_a_loop_by_hand_does(micro_batch):
    model = toy()
    loop = loop_over(model, micro_batch)
    for _ in range(5):
        loop.step()
    losses, weights = by_hand(5, 8)
    torch.testing.assert_close(loop.losses, losses)
    torch.testing.assert_close(list(model.parameters()), weights)
    assert losses[0] > losses[-1] * 1.01  # it learned something, so that wrong steps would show


def test_each_step_leaves_a_loss_a_time_and_the_memory_in_use_and_no_graph_or_gradients(monkeypatch):
    read, model = iter([100, 300, 200]), toy()
    monkeypatch.setattr(module.memory, "in_use", lambda device: lambda: next(read))
    loop = loop_over(model)
    for _ in range(3):
        loop.step()
    assert len(loop.losses) == len(loop.clock.seconds()) == 3
    assert all(isinstance(loss, Tensor) and loss.grad_fn is None for loss in loop.losses)  # still on the device
    assert all(seconds > 0 for seconds in loop.clock.seconds())
    assert loop.memory_bytes == [100, 300, 200]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_garbage_is_collected_between_steps_now_and_then_and_never_inside_one(monkeypatch):
    monkeypatch.setattr(module, "COLLECT_EVERY", 3)
    loop = loop_over(toy())
    stopped_before_collecting = []

    def watch(phase: str, _: dict) -> None:
        if phase == "start":
            stopped_before_collecting.append(len(loop.clock.seconds()))

    gc.disable()
    gc.callbacks.append(watch)
    try:
        for _ in range(7):
            loop.step()
    finally:
        gc.callbacks.remove(watch)
        gc.enable()
        gc.unfreeze()
    assert stopped_before_collecting == [3, 6]
