"""Kinds of GPU kernels, by their names."""

import re
from collections import Counter
from collections.abc import Mapping

#: Kinds of kernels by regular expressions of their names; the first match counts, ``other`` if none does.
KERNEL_KINDS = {
    "communication": r"^nccl",
    "compiled": r"^triton_",
    "attention": r"flash|fmha|attention|sdpa",
    "convolution": r"conv(?!ert)|wgrad|dgrad|winograd|im2col|col2im",
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


def by_kind(kernels: Mapping[str, int]) -> Counter[str]:
    """Count kernels by kind, given their counts by name."""
    kinds = Counter[str]()
    for name, count in kernels.items():
        kinds[kernel_kind(name)] += count
    return kinds
