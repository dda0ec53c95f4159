"""Ring attention against attention to whole sequences, on ranks that share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ptdbench.parallel import ring
from ptdbench.parallel.positions import Positions
from tests.parallel.ranks import on_ranks

RANKS, LENGTH = 4, 16

#: By name: heads of queries, heads of keys and values, dtype.
CASES = {
    "as many": (4, 4, torch.float32),
    "grouped": (4, 2, torch.float32),
    "one for all": (3, 1, torch.float32),
    "bf16": (4, 2, torch.bfloat16),
}


def drawn(heads: int, groups: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and the gradient of their mixture."""
    generator = torch.Generator().manual_seed(0)
    found = [
        torch.randn(2, count, LENGTH, 8, generator=generator).to(dtype) for count in (heads, groups, groups, heads)
    ]
    return found[:3], found[3]


def of_whole(name: str) -> list[Tensor]:
    """The mixture and the gradients of whole sequences."""
    inputs, gradient = drawn(*CASES[name])
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def of_shares() -> dict[str, Any]:
    """In a rank: the same of its positions."""
    mesh = init_device_mesh("cpu", (RANKS,))
    positions = Positions(RANKS, dist.get_rank(), paired=True)
    found = {}
    for name, case in CASES.items():
        whole, gradient = drawn(*case)
        inputs = [positions.own(tensor, 2).requires_grad_() for tensor in whole]
        out = ring.attention(mesh)(*inputs)
        found[name] = [out.detach(), *torch.autograd.grad(out, inputs, positions.own(gradient, 2))]
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return on_ranks(RANKS, of_shares)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_to_all_positions(of_ranks, name):
    tolerance = 1e-5 if CASES[name][2] == torch.float32 else 3e-2
    for rank, of_rank in enumerate(of_ranks):
        positions = Positions(RANKS, rank, paired=True)
        for own, whole in zip(of_rank[name], of_whole(name), strict=True):
            torch.testing.assert_close(own, positions.own(whole, 2), rtol=tolerance, atol=tolerance)


def of_one_rank(dtype: torch.dtype) -> list[Tensor]:
    """In a rank with a GPU: mixture and gradients of sequences that end within a tile."""
    mesh = init_device_mesh("cpu", (1,))
    inputs, gradient = drawn(4, 2, dtype)
    of_gpu = [tensor[:, :, :10].cuda().requires_grad_() for tensor in inputs]
    out = ring.attention(mesh)(*of_gpu)
    return [tensor.cpu() for tensor in (out.detach(), *torch.autograd.grad(out, of_gpu, gradient[:, :, :10].cuda()))]


@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_a_gpu(dtype):
    """Of one rank, which needs no messages."""
    inputs, gradient = drawn(4, 2, dtype)
    inputs = [tensor[:, :, :10].requires_grad_() for tensor in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, gradient[:, :, :10])]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for own, whole in zip(on_ranks(1, of_one_rank, dtype)[0], expected, strict=True):
        torch.testing.assert_close(own, whole, rtol=tolerance, atol=tolerance)


def test_this_torch_has_it():
    assert ring.missing() is None
