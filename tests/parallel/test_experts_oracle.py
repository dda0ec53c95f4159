"""Faults of experts that frameworks have had, injected one by one: each is detected by losses or norms.

``docs/injected-faults.md`` lists them.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from ptdbench.models.experts import Experts, Router
from ptdbench.models.state import ModuleState
from ptdbench.parallel import context, engine, experts, tensor
from ptdbench.parallel import pipeline_engine as pipeline
from ptdbench.parallel.experts import Routing
from ptdbench.parallel.strategy import Strategy
from ptdbench.profiling.events import COMBINE
from tests.parallel.few_steps import by_hand
from tests.parallel.oracle import Faults, after, is_on, of
from tests.parallel.ranks import each, mesh_of, on_ranks
from tests.parallel.test_experts import LAYOUTS, SAMPLES, by_layout, model

_init, _settle, _begin = Routing.__init__, Routing.settle, Routing.begin
_compute, _sort, _balance = Experts.forward, Router._sort, Router.balance
_sent, _back, _exchange, _placed = experts._Sent.apply, experts._Sent.backward, experts._with_exchange, tensor.placed


def after_init(**values: Any) -> AbstractContextManager[Any]:
    def init(self: Routing, *arguments: Any) -> None:
        _init(self, *arguments)
        for name, value in values.items():
            setattr(self, name, value(self))

    return patch.object(Routing, "__init__", init)


def without_experts(parameters: Any) -> torch.Tensor:
    return engine_norm(weight for weight in parameters if weight.dim() < 3)


def of_own_experts(parameters: Any) -> torch.Tensor:
    """The norm of what is here of experts, as if the other ranks' were copies."""
    weights = list(parameters)
    others = engine_norm(weight for weight in weights if weight.dim() < 3)
    local = [weight.grad.to_local().norm() ** 2 for weight in weights if weight.dim() == 3]
    return (others**2 + sum(local)).sqrt()


engine_norm = engine.norm_of


def not_sent_back(ctx: Any, gradient: torch.Tensor) -> Any:
    gradient_of_rows, *others = _back(ctx, gradient)
    return torch.zeros_like(gradient_of_rows) if ctx.way == COMBINE else gradient_of_rows, *others


def of_the_first(meta: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if values.dim() == 3 and isinstance(meta, DTensor):
        values = values.roll(meta.device_mesh.get_local_rank() * len(meta.to_local()), 0)
    return _placed(meta, values)


def dropped(self: Router, chosen: torch.Tensor) -> Any:
    with patch.object(self, "capacity", 1.0):
        return _sort(self, chosen)


def not_whole(self: Any, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
    for part in module.modules():
        tensor.spread(part, device_mesh, Replicate(), Replicate())
    return module


def backwards(self: Router, counts: torch.Tensor) -> None:
    before = self.bias.clone()
    _balance(self, counts)
    self.bias.copy_(2 * before - self.bias)


#: By what is broken: the fault, and the layout and the balance in which it matters.
FAULTS: Faults = {
    "expert gradients not divided by the expert degree": (lambda: after_init(_scale=lambda _: 1.0), "shards", "loss"),
    "expert gradients halved": (lambda: after_init(_scale=lambda it: it._scale / 2), "replicas", "loss"),
    "expert gradients scaled without the tensor degree": (
        lambda: after_init(_scale=lambda it: it._scale / it._tensor), "tensor", "loss"),
    "expert gradients not rescaled after backward": (lambda: after_init(_experts=lambda _: ()), "context", "loss"),
    "auxiliary loss from the loads of one rank": (lambda: after_init(_groups=lambda _: []), "shards", "loss"),
    "auxiliary loss from loads not summed over data-parallel ranks": (
        lambda: after_init(_groups=lambda it: it._groups[1:]), "tensor", "loss"),
    "auxiliary loss from loads not summed over tensor ranks": (
        lambda: after_init(_groups=lambda it: it._groups[:1]), "tensor", "loss"),
    "auxiliary loss added on every tensor rank": (lambda: after_init(_tensor=lambda _: 1), "tensor", "loss"),
    "auxiliary loss from a micro-batch's loads": (
        of(Router, "auxiliary_gradient", lambda self, counts: (
            self.routing.coefficient * self.experts * self.active / counts.sum() * self.share * counts / counts.sum())),
        "shards", "loss"),
    "auxiliary loss not scaled by the micro-batch's share": (of(Routing, "begin", lambda *_: None), "pipeline", "loss"),
    "router loads never updated": (of(Router, "balance", lambda *_: None), "shards", "loss"),
    "choices made during shape inference counted": (of(ModuleState, "restore", lambda _: None), "pipeline", "loss"),
    "gradient norm without the experts": (of(engine, "norm_of", without_experts), "shards", "loss"),
    "gradient norm of the local experts only": (of(engine, "norm_of", of_own_experts), "shards", "loss"),
    "gradient norm of stages without the experts": (of(pipeline, "norm_of", without_experts), "pipeline", "loss"),
    "output of the last dispatched token zeroed": (
        after(Experts, "forward", lambda rows: rows * (torch.arange(len(rows)) < len(rows) - 1)[:, None]),
        "context", "loss"),
    "output of the first dispatched token doubled": (
        after(Experts, "forward", lambda rows: rows * (1 + (torch.arange(len(rows)) < 1)[:, None])), "shards", "loss"),
    "tokens processed by the neighboring expert": (
        of(Experts, "forward", lambda self, tokens, counts: _compute(self, tokens, counts.roll(1))),
        "replicas", "loss"),
    "combined outputs assigned to the wrong tokens": (  # in what comes back from experts
        of(experts._Sent, "apply", lambda rows, *how: _sent(rows, *how).roll(int(how[-1][0] == COMBINE), 0)),
        "shards", "loss"),
    "gradients lost in combine": (of(experts._Sent, "backward", staticmethod(not_sent_back)), "shards", "loss"),
    "tokens dispatched to ranks with the same experts": (  # of which there are as many
        of(experts, "_with_exchange", lambda _, *how: _exchange(
            mesh_of(Strategy(**LAYOUTS["shards"]).dims(4)).regrouped["ep"]["ep_copies"], *how)), "shards", "loss"),
    "experts of the first rank drawn on all ranks": (of(tensor, "placed", of_the_first), "shards", "loss"),
    "tokens dropped beyond a capacity of 1": (of(Router, "_sort", dropped), "shards", "loss"),
    "router gradients not summed over tensor ranks": (of(tensor._Replicated, "_apply", not_whole), "tensor", "loss"),
    "gradients of unsharded experts not all-reduced over tensor ranks": (
        of(tensor._Replicated, "_apply", not_whole), "tensor without FSDP", "loss"),
    "weights of the chosen experts not normalized": (
        after(Router, "forward", lambda routed: (routed[0] * 0.5, *routed[1:])), "shards", "loss"),
    "bias moved with the load, not against it": (of(Router, "balance", backwards), "shards", "bias"),
    "bias from the loads of one rank": (lambda: after_init(_groups=lambda _: []), "shards", "bias"),
    "positions from 0 on every context rank": (
        of(context, "_number", lambda _p, _m, arguments: arguments), "context", "forced"),
}  # fmt: skip


def faulty(name: str) -> list[list[float]]:
    """In each of four ranks: losses and norms of a program with a fault."""
    make, layout, balance = FAULTS[name]
    with make():
        return by_layout(layout, balance)


#: Before torch 2.14 shapes are inferred on the meta device, where nothing is counted.
UNSEEN_BEFORE_2_14 = () if torch.__version__ >= "2.14" else ("choices made during shape inference counted",)


@pytest.mark.ranks
@pytest.mark.thorough
def test_every_fault_is_detected():
    (of_first, *_) = on_ranks(4, each, faulty, [*FAULTS])
    expected = {balance: by_hand(model(balance), SAMPLES) for balance in ("loss", "bias", "forced")}
    unseen = [
        name
        for name, (_, _, balance) in FAULTS.items()
        if name not in UNSEEN_BEFORE_2_14
        and of_first[name] == [pytest.approx(step, rel=1e-5) for step in expected[balance]]
    ]
    assert unseen == []


def test_the_page_lists_them():
    assert is_on("injected-faults.md", FAULTS)
