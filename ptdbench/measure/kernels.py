"""The kernels of a GPU's step by what they are for, as torch's profiler and NVIDIA's libraries name them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from ptdbench.measure.trace import STEP

#: Kinds by what their kernels' names have, the first that fits; ``other`` where none does.
KINDS = {
    "communication": r"^nccl",
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


def of_step(path: Path) -> dict[str, int]:
    """The kernels of a profiled step by kind, the most frequent first; of several steps the mean, rounded.

    Args:
        path: A trace in Chrome's format.

    Raises:
        ValueError: It holds no profiled step.
    """
    events = json.loads(path.read_bytes(), strict=False)["traceEvents"]
    steps = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)
    ]
    if not steps:
        raise ValueError(f"{path} holds no profiled step")
    inside = (
        event["name"]
        for event in events
        if event.get("cat") == "kernel" and any(begin <= event["ts"] < end for begin, end in steps)
    )
    counts = Counter(map(kind, inside))
    return {kind: round(count / len(steps)) for kind, count in counts.most_common()}
