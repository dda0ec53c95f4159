from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ptdbench.models.toy import Toy
from ptdbench.parallel.engine import Accumulating, LaidOutModule, norm_of
from ptdbench.parallel.experts import Routing
from tests.parallel.made import on_meta, unscaled, with_weights


def toy() -> Toy:
    return with_weights(on_meta(Toy, inputs=4, width=6, outputs=2, layers=3))


def engine(model: Toy, micro_batch: int, **options) -> Accumulating:
    return Accumulating(LaidOutModule(model, model, **options), micro_batch)


def test_norm_of_large_gradients_is_exact():
    weights = [torch.nn.Parameter(torch.empty(shape)) for shape in ((8192, 768), (768,), (16, 8, 3, 3), ())]
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    expected = torch.cat([weight.grad.double().flatten() for weight in weights]).norm()
    assert norm_of(weights).item() == pytest.approx(expected.item(), rel=1e-6)


def test_only_the_last_pass_communicates():
    events, model = [], toy()

    @contextmanager
    def deferred() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    model.register_forward_hook(lambda *_: events.append("forward"))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    engine(model, 2, deferred=deferred).gradients(torch.randn(6, 4), torch.randn(6, 2), unscaled)
    assert events == 2 * ["begin", "forward", "backward", "end"] + ["forward", "backward"]


def test_outputs_release_gathered_weights():
    released, model = [], toy()
    whole = engine(model, 2, release=lambda: released.append(True))
    inputs, targets = torch.randn(6, 4), torch.randn(6, 2)
    torch.testing.assert_close(whole.outputs(inputs, targets), model(inputs, targets))
    assert not whole.outputs(inputs).requires_grad
    with pytest.raises(RuntimeError):
        whole.outputs(torch.randn(6, 5))
    assert len(released) == 3


def test_rehearsal_changes_nothing():
    """Neither gradients nor buffers, weights nor random numbers; the passes are those that the part asks for."""
    model = toy()
    model.register_parameter("slow", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    model.register_forward_pre_hook(lambda *_: model.slow.data.add_(1) and None)
    model.register_buffer("count", torch.zeros(1))
    model.register_forward_pre_hook(lambda *_: model.count.add_(torch.rand(1)) and None)
    passes = []
    [*model.parameters()][-1].register_post_accumulate_grad_hook(lambda _: passes.append(True))
    inputs, targets = torch.randn(6, 4), torch.randn(6, 2)
    before = torch.get_rng_state()
    whole = engine(model, 3, settles_after=2)
    whole.written = ["slow"]
    whole.rehearse(inputs, targets, unscaled)
    assert len(passes) == 2 * 2
    assert (model.count, model.slow) == (0, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("made_in", ["constructor", "first pass"])
def test_rehearsal_restores_expanded_and_late_buffers(made_in):
    model = toy()
    model.register_buffer("mask", torch.ones(1).expand(4) if made_in == "constructor" else None)
    model.register_forward_pre_hook(
        lambda *_: setattr(model, "mask", torch.ones(3) if model.mask is None else model.mask)
    )
    engine(model, 3, settles_after=1).rehearse(torch.randn(6, 4), torch.randn(6, 2), unscaled)
    assert model.mask is None if made_in == "first pass" else all(model.mask == 1)


def test_rehearsal_counts_no_choices():
    routing = Routing.__new__(Routing)  # of no ranks: only what it counts
    routing._totals, routing._loads = {"router": torch.tensor([3.0, 4.0])}, array("d", [7.0])

    def settle():
        routing._totals["router"] = routing._totals["router"] + 1
        routing._loads.append(2.0)

    inputs, targets = torch.randn(6, 4), torch.randn(6, 2)
    whole = engine(toy(), 3, settles_after=2, routing=routing, settle=settle)
    whole.rehearse(inputs, targets, unscaled)
    assert (routing._totals["router"].tolist(), routing._loads.tolist()) == ([3.0, 4.0], [7.0])
    whole.gradients(inputs, targets, unscaled)
    assert (routing._totals["router"].tolist(), routing._loads.tolist()) == ([4.0, 5.0], [7.0, 2.0])
