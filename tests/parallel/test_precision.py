from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ptdbench.parallel.precision import AgreedGradScaler, arithmetic, autocast_forward
from tests.parallel.ranks import on_ranks


@pytest.mark.parametrize(
    ("precision", "device", "setting", "name"),
    [
        ("fp32", "cuda", "highest", "fp32"),
        ("fp32", "cuda", "high", "tf32"),
        ("fp32", "cpu", "high", "fp32"),
        ("bf16", "cuda", "high", "bf16"),
        ("fp16", "cuda", "highest", "fp16"),
    ],
)
def test_what_products_run_in(monkeypatch, precision, device, setting, name):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
    assert arithmetic(precision, device) == name


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_are_narrow_and_weights_are_not(precision, dtype):
    layer = nn.Linear(4, 4)
    names = list(layer.state_dict())
    autocast_forward(layer, precision, "cpu")
    outputs = layer(torch.ones(2, 4))
    assert outputs.dtype == dtype
    assert not torch.is_autocast_enabled("cpu")  # only around the forward
    outputs.float().sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    assert list(layer.state_dict()) == names


def test_fp32_leaves_the_forward_alone():
    layer = nn.Linear(4, 4)
    autocast_forward(layer, "fp32", "cpu")
    assert "forward" not in vars(layer)


def overflow_on_one_rank(fused: bool) -> dict[str, Any]:
    """Two steps: in the first, rank 1's gradient has overflowed. Rank 0 never scales a loss, as an early stage."""
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    scaler = AgreedGradScaler("cpu", enabled=True)
    seen: dict[str, Any] = {"scales": [scaler.get_scale()], "weights": [], "gradients": []}
    for overflows in (True, False):
        gradient = torch.full((3,), torch.inf if overflows and rank == 1 else scaler.get_scale())
        if rank == 1:
            scaler.scale(torch.ones(()))
        weight.grad = gradient.clone()
        scaler.step(optimizer)
        scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["weights"].append(weight.detach().clone())
        seen["gradients"].append(gradient)
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_makes_all_skip_the_step(fused):
    ranks = on_ranks(2, overflow_on_one_rank, fused)
    assert ranks[0]["gradients"][0].isfinite().all()
    assert ranks[1]["gradients"][0].isinf().all()
    for seen in ranks:
        assert seen["scales"] == [2.0**16, 2.0**15, 2.0**15]  # halved after the overflow
        assert torch.equal(seen["weights"][0], torch.ones(3))
        # The gradient is 1 once it is unscaled; Adam's first step then has the length of the learning rate.
        torch.testing.assert_close(seen["weights"][1], torch.full((3,), 0.9))


def test_a_scaler_that_is_off_changes_nothing():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = AgreedGradScaler("cpu", enabled=False)  # and needs no process group
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.full((3,), 0.5))
