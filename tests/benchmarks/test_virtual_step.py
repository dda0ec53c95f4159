"""What a step asks of a GPU: bytes of operations by their tensors, and kernels by their names."""

import os
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import virtual_step as subject
from tests.conftest import ROOT
from tests.programs import call

A = torch.zeros(8, 4)  # 128 bytes
ROWS = torch.tensor([1, 5])  # 16 bytes


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        (lambda: A + A, 128 + 128),  # one tensor is read once
        (lambda: A + torch.ones(4).expand(8, 4), 16 + 128 + 16 + 128),  # made, then read unexpanded
        (A.T.view(4, 2, 4)[0].detach, 0),
        (lambda: A.clone().add_(1), 256 + 256),
        (lambda: A.clone().zero_(), 256 + 128),
        (lambda: A.to(torch.bfloat16), 128 + 64),
        (lambda: torch._foreach_copy_([torch.empty(4)], [torch.empty(4, dtype=torch.float64)]), 32 + 16),
        (lambda: F.embedding(ROWS, A), 16 + 32 + 32),  # the rows, not the table
        (lambda: torch.mm(A, A.T), 128 + 128 + 256),  # a view is a factor of its own
    ],
)
def test_bytes_are_those_that_an_operation_reads_and_writes(operation: Callable[[], Tensor], size):
    with subject.Counted() as counted:
        operation()
    assert sum(one for _, one, _ in counted.operations) == size


def test_a_product_has_flops_and_waits_for_the_slower_of_both():
    with subject.Counted() as counted:
        torch.mm(A, A.T)
    ((kind, size, flops),) = counted.operations
    assert (kind, flops) == ("product", 2 * 8 * 8 * 4)
    gpu = subject.machine("h100").gpu
    by_memory = size / gpu.bandwidth / subject.SHARES["memory"]
    assert subject.seconds(counted.operations, gpu) == pytest.approx(by_memory)
    by_arithmetic = 1e12 / gpu.peaks["bf16"] / subject.SHARES["product"]
    assert subject.seconds([("product", size, 1e12)], gpu) == pytest.approx(by_arithmetic)


@pytest.mark.parametrize(
    ("kernel", "is_cast"),
    [
        ("triton_poi_fused__to_copy_12", True),
        ("triton_poi_fused__to_copy_view_2", True),
        ("triton_poi_fused__to_copy_add_5", False),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(...)>", True),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(...), LoadWithCast<1>>", True),
        ("void at::native::vectorized_elementwise_kernel<8, converting_copy_kernel_cuda<float, c10::BFloat16>>", True),
        ("void at::native::unrolled_elementwise_kernel<CUDAFunctor_add<float>, LoadWithCast<2>>", False),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float, 2, 1, 1>>", True),
    ],
)
def test_a_cast_does_nothing_else(kernel, is_cast):
    assert subject.is_cast(kernel) == is_cast


@pytest.mark.thorough
def test_the_step_of_a_small_model_has_a_row(tmp_path):
    small = ("--model", "gpt_tiny", "--batch", "2", "--sequence", "64", "--only", "ours", "nanogpt", "--modes", "false")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = call(sys.executable, "benchmarks/virtual_step.py", *small, cwd=ROOT, environ=environ, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "eager" in line]
    assert [name for name, *_ in rows] == ["ours, eager", "nanogpt, eager"]
    (_, ours, ours_casts, *_), (_, theirs, theirs_casts, *_) = rows
    assert 0 < int(ours) < int(theirs)
    assert 0 < int(ours_casts) < int(theirs_casts)
