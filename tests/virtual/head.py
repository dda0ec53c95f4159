"""Head and MLP of a language model on a virtual GPU: prints kernels of their passes, and the head's memory, as JSON."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ptdbench.kernels.copies import Copies, enable_wide_gradients
from ptdbench.kernels.linear_cross_entropy import LinearCrossEntropy
from ptdbench.kernels.softmax import VocabularyShare
from ptdbench.models.gpt import MLP

#: On a GPU of 20 GiB two chunks.
ROWS, VOCABULARY, WIDTH = 6000, 50304, 64

#: Of all the vocabulary, and as ranks compute that share it.
LOSSES = {"whole": LinearCrossEntropy(), "share": LinearCrossEntropy()}
LOSSES["share"].share = VocabularyShare(0, torch.clone, torch.clone)


def counted(loss_of: Callable[..., Tensor]) -> dict[str, Any]:
    """Kernels of a forward and backward pass by name, and the bytes that it takes at its peak."""
    hidden, weight = torch.zeros(ROWS, WIDTH, device="cuda"), torch.zeros(VOCABULARY, WIDTH, device="cuda")
    targets = torch.zeros(ROWS, dtype=torch.int64, device="cuda")

    def run() -> None:
        narrow = hidden.bfloat16().requires_grad_()
        loss_of(narrow, weight.bfloat16(), targets, weight.requires_grad_()).backward()
        weight.grad = None

    run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    return {"kernels": kernels_of(run), "peak": peak}


def kernels_of(run: Callable[[], None]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
    return Counter(event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def kernels_of_mlp() -> Counter[str]:
    """Of so many tokens that Inductor would sum gradients in a kernel of its own, if all at once."""
    mlp = MLP(2048).cuda()
    enable_wide_gradients(mlp)
    mlp.forward = torch.compile(mlp.forward, fullgraph=True)  # type: ignore[method-assign]
    Copies(mlp, [], torch.bfloat16)
    x = torch.zeros(16, 1024, 2048, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    mlp(x).sum().backward()
    return kernels_of(lambda: mlp(x).sum().backward())


if __name__ == "__main__":
    answers: dict[str, Any] = {"mlp": kernels_of_mlp()}
    for name, loss in LOSSES.items():
        answers[name] = counted(loss)
        answers[f"{name} compiled"] = counted(torch.compile(loss, fullgraph=True))
    print(json.dumps(answers))
