import copy
from typing import Any

import pytest
import torch
from torch import nn

from ptdbench.optim.muon import Muon
from ptdbench.setup import run_spec
from tests.conftest import read
from tests.optim.made_muon import muon_of

STEPS = 4


def model() -> nn.Module:
    """A wide matrix, a tall one, and one of each other kind but kernels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 5), nn.Linear(5, 3))


def train(module: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = STEPS) -> nn.Module:
    tokens = torch.arange(14).reshape(2, 7) % 7
    for _ in range(steps):
        module(tokens).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return module


def same(first: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torchs_muon_and_adamw(scale, nesterov):
    theirs, ours = model(), model()
    options: dict[str, Any] = {"weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": scale}
    matrices, vectors, others = (
        [theirs[1].weight, theirs[3].weight],
        [weight for weight in theirs.parameters() if weight.dim() < 2],
        [theirs[0].weight, theirs[4].weight],
    )
    try:
        muon = torch.optim.Muon(matrices, lr=0.02, **options)
    except ValueError:
        pytest.skip("this torch has not that scale")
    decayed = [{"params": others, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decayed, lr=1e-2, betas=(0.8, 0.9), fused=True)
    make = muon_of(ours, lr=0.02, adamw_lr=1e-2, betas=[0.8, 0.9], ns_precision="bf16", **options)
    assert same(train(theirs, muon, adamw), train(ours, make(ours.named_parameters())))
    assert not same(ours, model())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp8", "fp8_tensorwise"])
def test_newton_schulz_precision(precision):
    module, exact = model(), precision in ("fp32", "tf32")
    optimizer = muon_of(module, ns_precision=precision, lr=1.0, adjust_lr_fn="original", weight_decay=0.0)(
        module.named_parameters()
    )
    before = module[3].weight.detach().clone()
    train(module, optimizer, steps=1)
    step = (before - module[3].weight).detach()
    assert torch.linalg.svdvals(step)[:2] == pytest.approx(1.0, abs=0.3)
    assert torch.allclose(step, step.bfloat16().float(), rtol=1e-4, atol=0) is not exact
    assert optimizer.gathers == (4 if exact else 2)


def test_groups_have_their_rates():
    optimizer = muon_of(module := model(), lr=0.5, adamw_lr=0.25)(module.named_parameters())
    assert {group["rule"]: group["lr"] for group in optimizer.param_groups} == {
        "matrices": 0.5, "embeddings": 0.25, "head": 0.25, "vectors": 0.25,
    }  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert same(train(module, optimizer), model())


def test_its_state_is_one_and_can_be_loaded():
    first = train(ours := model(), optimizer := muon_of(ours)(ours.named_parameters()))
    assert {len(optimizer.state[weight]) for weight in (ours[1].weight, ours[3].weight)} == {1}
    assert len(optimizer.state) == len(list(ours.parameters()))
    second = copy.deepcopy(first)
    loaded = muon_of(second)(second.named_parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(first, optimizer)
    train(second, loaded)
    assert same(first, second)


@pytest.mark.parametrize("held", [["1.weight"], ["0.weight", "1.bias"]])
def test_a_stage_may_have_matrices_alone_or_none(held):
    make, module = muon_of(model()), model()
    mine = {name: weight for name, weight in module.named_parameters() if name in held}
    train(module, make(mine.items()))
    moved = [name for name, weight in model().named_parameters() if not torch.equal(weight, module.get_parameter(name))]
    assert moved == held


def test_preset_follows_rate_and_precision():
    def of(*overrides: str) -> Muon:
        spec = run_spec.specify(read("optimizer=muon", "model=toy", "model.layers=3", *overrides), None)
        optimizer = spec.training.optimizer([("chain.1.linear.weight", nn.Parameter(torch.zeros(2, 2)))])
        assert isinstance(optimizer, Muon)
        return optimizer

    assert (of("optimizer.lr=0.5").defaults["lr"], of().gathers, of("precision=bf16").gathers) == (0.5, 4, 2)
