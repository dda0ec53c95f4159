"""Which positions each rank has, and ring attention against attention to whole sequences."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend

from ptdbench.parallel import context
from ptdbench.parallel.context import Positions
from tests.parallel.ranks import on_ranks


def of_each_rank(ranks: int, paired: bool) -> list[Positions]:
    return [Positions(ranks, rank, paired) for rank in range(ranks)]


def test_consecutive_and_from_both_ends():
    whole = torch.arange(8)
    assert [positions.share(whole, 0).tolist() for positions in of_each_rank(2, False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [positions.share(whole, 0).tolist() for positions in of_each_rank(2, True)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    shares = [positions.share(whole, 0).tolist() for positions in of_each_rank(4, True)]
    assert shares == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_paired_positions_balance_work(ranks):
    of_rank = [int((positions.share(torch.arange(24), 0) + 1).sum()) for positions in of_each_rank(ranks, True)]
    assert len(set(of_rank)) == 1


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_reassemble_the_sequence(ranks, paired):
    whole = torch.rand(2, 12, 3)
    every = of_each_rank(ranks, paired)
    for positions in every:
        share = positions.share(whole, 1)
        numbers = positions.numbers(torch.arange(share.shape[1]))
        assert torch.equal(whole[:, numbers], share)
    shares = [positions.share(whole, 1) for positions in every]
    assert torch.equal(every[0].whole(shares, 1), whole)


RANKS, LENGTH = 4, 16

#: By name: heads of queries, heads of keys and values, dtype.
CASES = {
    "as many": (4, 4, torch.float32), "grouped": (4, 2, torch.float32), "one for all": (3, 1, torch.float32),
    "bf16": (4, 2, torch.bfloat16),
}  # fmt: skip


def drawn(heads: int, groups: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and the gradient of their mixture."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, count, LENGTH, 8, generator=generator).to(dtype) for count in (heads, groups, groups, heads)
    ]
    return tensors[:3], tensors[3]


def of_whole(name: str) -> list[Tensor]:
    """The mixture and the gradients of whole sequences."""
    inputs, gradient = drawn(*CASES[name])
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def of_shares() -> dict[str, Any]:
    """In a rank: the same of its positions; and how many threads the groups have."""
    mesh = init_device_mesh("cpu", (RANKS,))
    dist.new_group()
    positions = Positions(RANKS, dist.get_rank(), paired=True)
    results = {}
    for name, case in CASES.items():
        whole, gradient = drawn(*case)
        inputs = [positions.share(tensor, 2).requires_grad_() for tensor in whole]
        out = context.ring_attention(mesh)(*inputs)
        results[name] = [out.detach(), *torch.autograd.grad(out, inputs, positions.share(gradient, 2))]
    groups = dist.distributed_c10d._world.pg_map
    return results | {"threads": [group._get_backend(torch.device("cpu")).options._threads for group in groups]}


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return on_ranks(RANKS, of_shares)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_ring_equals_full_attention(of_ranks, name):
    tolerance = 1e-5 if CASES[name][2] == torch.float32 else 3e-2
    for rank, of_rank in enumerate(of_ranks):
        positions = Positions(RANKS, rank, paired=True)
        for share, whole in zip(of_rank[name], of_whole(name), strict=True):
            torch.testing.assert_close(share, positions.share(whole, 2), rtol=tolerance, atol=tolerance)


@pytest.mark.ranks
def test_gloo_has_one_thread_for_each_group(of_ranks):
    """Two corrupt the heap where a functional all-gather is in flight with another collective of the group."""
    for of_rank in of_ranks:
        assert len(of_rank["threads"]) > 1
        assert set(of_rank["threads"]) == {1}


@pytest.mark.parametrize(("queries", "keys", "is_causal"), [(20, 20, True), (20, 10, False), (10, 20, False)])
@pytest.mark.parametrize(("name", "dtype"), [
    ("CPU", torch.float32),
    pytest.param("CUDNN", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("FLASH", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("EFFICIENT", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("EFFICIENT", torch.float32, marks=pytest.mark.gpu),
], ids=str)  # fmt: skip
def test_kernels_return_mergeable_results(name, dtype, queries, keys, is_causal):
    """Blocks as a ring has them: square and causal, or with half the keys, or half the queries."""
    kernel, device = getattr(context, name), "cpu" if name == "CPU" else "cuda"
    generator = torch.Generator().manual_seed(0)
    lengths, width = (queries, keys, keys, queries), 8  # of which GPUs need a multiple
    *inputs, gradient = (torch.randn(2, 3, length, width, generator=generator).to(device, dtype) for length in lengths)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    scores = exact[0] @ exact[1].mT / width**0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(queries, keys, device=device).triu(1).bool(), -math.inf)
    expected = scores.softmax(-1) @ exact[2]
    out, lse = kernel.forward(*inputs, is_causal)
    gradients = kernel.backward(gradient, *inputs, out, lse, is_causal)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), **tolerance)
    torch.testing.assert_close(out.double(), expected, **tolerance)
    for gradient_here, whole in zip(gradients, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        torch.testing.assert_close(gradient_here.double(), whole, **tolerance)


@pytest.mark.parametrize(
    ("chosen", "name"),
    [("CUDNN_ATTENTION", "CUDNN"), ("FLASH_ATTENTION", "FLASH"), ("EFFICIENT_ATTENTION", "EFFICIENT"),
     ("MATH", "EFFICIENT")],
)  # fmt: skip
def test_kernel_follows_torchs_choice(monkeypatch, chosen, name):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: getattr(SDPBackend, chosen).value)
    assert context.attention_kernel(torch.empty(1, device="meta"), trains=True) is getattr(context, name)


def test_kernel_choice_knows_the_backward_pass(monkeypatch):
    """An autograd function runs its forward pass without gradients: torch would choose for inference."""

    def choose(query: torch.Tensor, *_: Any) -> int:
        trains = query.requires_grad and torch.is_grad_enabled()
        return (SDPBackend.FLASH_ATTENTION if trains else SDPBackend.CUDNN_ATTENTION).value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    query = torch.empty(1, device="meta")
    with torch.no_grad():
        assert context.attention_kernel(query, trains=True) is context.FLASH
        assert context.attention_kernel(query, trains=False) is context.CUDNN


def test_efficient_backward_gets_contiguous_heads(monkeypatch):
    """Whatever the strides of a merged output are: those of a projection."""
    seen = []

    def backward(gradient, query, key, value, bias, out, *others, **options):
        seen.append(out)
        return gradient, query, key, value

    monkeypatch.setattr(context, "aten", SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward))
    tensors = [torch.randn(2, 4, LENGTH, 8) for _ in range(5)]
    gradients = context._efficient_backward(*tensors, torch.zeros(2, 4, LENGTH), True)
    assert [tensor.shape for tensor in gradients] == [tensors[0].shape] * 3
    (out,) = seen
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, tensors[4])
