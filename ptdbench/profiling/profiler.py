"""torch's profiler around a few steps, labels for the waits that it does not show, and kernels by purpose."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from ptdbench.profiling.trace import WAITING

#: Above the level of errors, one of which is that a machine without a GPU has none.
_SILENT = "99"

#: Operations in the table.
_ROWS = 40


@contextmanager
def profiled(device: torch.device, memory: bool = False) -> Iterator[profile]:
    """Watch what this rank does inside of the block; what was seen can be written after it.

    Not by ``torch.profiler.profile``, which imports the compiler for a second and a half.

    Args:
        device: The rank's device.
        memory: Also watch what memory is allocated and freed.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    on_gpu = "cuda" if device.type == "cuda" else None
    watching = profile(use_device=on_gpu, record_shapes=True, use_kineto=True, profile_memory=memory)
    with labelled_waits(), watching as taken:
        yield taken
        if on_gpu:
            torch.cuda.synchronize(device)


def operations(taken: profile) -> str:
    """A table of the operations, or kernels, that took the longest."""
    order = "self_cuda_time_total" if taken.use_device == "cuda" else "self_cpu_time_total"
    return str(taken.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=80))


@contextmanager
def labelled_waits() -> Iterator[None]:
    """Label each ``Work.wait()``: a trace of the CPU shows what communicates, but not what waits for it."""
    wait = dist.Work.wait

    def labelled(self: dist.Work, *arguments: Any, **options: Any) -> Any:
        with record_function(WAITING):
            return wait(self, *arguments, **options)

    dist.Work.wait = labelled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


#: The kind of NCCL's kernels.
COMMUNICATION = "communication"

#: Kinds by what their kernels' names have, the first that fits; ``other`` where none does.
KERNEL_KINDS = {
    COMMUNICATION: r"^nccl",
    "compiled": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa",
    "convolution": r"conv|wgrad|dgrad|winograd|im2col|col2im",
    "product": r"gemm|gemv|cublas|cutlass|nvjet|scaled_mm|splitk",
    "optimizer": r"multi_tensor_apply|fused_?(adam|sgd)|fusedoptimizer",
    "norm": r"layer_?norm|rms_?norm|batch_?norm|gammabeta|bn_(fw|bw)|group_?norm",
    "reduction": r"reduce_kernel|softmax|logsumexp|argmax|topk|sort|scan",
    "copy": r"copy|catarray|loadwithcast|memcpy",
    "elementwise": r"elementwise|gelu|silu|dropout",
}


def kernel_kind(name: str) -> str:
    """Classify a kernel by its purpose."""
    return next((kind for kind, has in KERNEL_KINDS.items() if re.search(has, name, re.IGNORECASE)), "other")
