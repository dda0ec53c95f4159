from __future__ import annotations

import torch
from torch import nn

from ptdbench.parallel.activations import recompute, wrap_forward


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x).tanh()


def test_a_wrapper_stands_inside_of_hooks_and_leaves_names_as_they_are():
    layer, seen = nn.Linear(2, 2), []
    names = list(layer.state_dict())

    def wrapper(forward):
        def wrapped(*arguments):
            seen.append("wrapper")
            return forward(*arguments)

        return wrapped

    layer.register_forward_pre_hook(lambda *_: seen.append("hook"))
    wrap_forward(layer, wrapper)
    layer(torch.ones(1, 2))
    assert seen == ["hook", "wrapper"]
    assert list(layer.state_dict()) == names


def test_recomputation_runs_each_layer_twice_keeps_only_its_input_and_changes_no_number():
    torch.manual_seed(0)
    plain = nn.Sequential(*(Counted() for _ in range(3)))
    torch.manual_seed(0)
    frugal = nn.Sequential(*(Counted() for _ in range(3)))
    names = list(frugal.state_dict())
    recompute(list(frugal))
    assert list(frugal.state_dict()) == names

    saved: dict[str, int] = {}
    for name, model in (("plain", plain), ("frugal", frugal)):
        kept: list[int] = []
        # A recomputed layer saves for itself what autograd would; what autograd keeps is seen here.
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(1), t)[1], lambda t: t):
            loss = model(torch.ones(2, 4)).square().sum()
        saved[name] = len(kept)
        loss.backward()
    assert [layer.calls for layer in plain] == [1, 1, 1]
    assert [layer.calls for layer in frugal] == [2, 2, 2]
    assert saved["frugal"] < saved["plain"]
    for ours, theirs in zip(frugal.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
