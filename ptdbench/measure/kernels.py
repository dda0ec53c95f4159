"""The kernels of a GPU's step by what they are for, as torch's profiler and NVIDIA's libraries name them."""

from __future__ import annotations

import re

#: The kind of NCCL's kernels.
COMMUNICATION = "communication"

#: Kinds by what their kernels' names have, the first that fits; ``other`` where none does.
KINDS = {
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


def kind(name: str) -> str:
    """What a kernel is for."""
    return next((kind for kind, has in KINDS.items() if re.search(has, name, re.IGNORECASE)), "other")
