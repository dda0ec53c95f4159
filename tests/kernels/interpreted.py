"""The kernels of a softmax under Triton's interpreter, on a CPU: prints how far they are from torch in fp64, as JSON.

``TRITON_INTERPRET=1`` has to be set before Triton is imported, so this is a program.
"""

import json
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdbench.kernels import linear_cross_entropy, softmax, softmax_triton

#: More columns than a block has, one more than a power of two, and fewer than a lane.
VOCABULARIES = (20000, 1025, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def yes(_: Any) -> bool:
    """What a graph can call, and no mock."""
    return True


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits whose rows are apart, and targets at both ends."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(rows, vocabulary + 3, generator=generator) * scale).to(dtype)[:, :vocabulary]
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    return logits, targets


def expected(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum, in fp64."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), exact)[0]


def errors(losses: Tensor, gradient: Tensor, wanted: tuple[Tensor, Tensor]) -> list[float]:
    """The largest error of a loss, and of an element of the gradient beyond its rounding, both of an fp32 of size 1.

    The interpreter cuts a bf16 off, where a GPU rounds it to the nearest.
    """
    rounding = torch.finfo(gradient.dtype).eps * wanted[1].abs() / (1 if gradient.dtype == torch.bfloat16 else 2)
    beyond = (gradient.double() - wanted[1]).abs() - rounding
    relative = (losses.double() - wanted[0]).abs() / wanted[0].clamp(min=1)
    return [(error.max() / torch.finfo(torch.float32).eps).item() for error in (relative, beyond)]


def ordinary() -> dict[str, Any]:
    """Each dtype and size of a vocabulary."""
    results = {}
    for dtype in DTYPES:
        for vocabulary in VOCABULARIES:
            logits, targets = logits_of(5, vocabulary, dtype)
            wanted, kept = expected(logits, targets), logits.clone()
            unchanged = softmax_triton.cross_entropy_(logits, targets, gradient=False)
            assert torch.equal(logits, kept)
            losses = softmax_triton.cross_entropy_(logits, targets, gradient=True)
            assert torch.equal(losses, unchanged)
            results[f"{dtype} {vocabulary}"] = errors(losses, logits, wanted)
    return results


def extreme() -> dict[str, Any]:
    """Logits near the end of what a dtype holds, -inf, and targets that are nearly certain."""
    results = {}
    for dtype in DTYPES:
        logits, targets = logits_of(6, 1025, dtype, 1e4)
        logits[1], logits[2] = -torch.finfo(dtype).max, torch.finfo(dtype).max
        logits[3, 1:] = float("-inf")
        targets[3] = 0
        logits[4] = 0
        logits[4, targets[4]] = 14.0  # of which e-6 * 1024 is left
        wanted = expected(logits, targets)
        losses = softmax_triton.cross_entropy_(logits, targets, gradient=True)
        results[str(dtype)] = errors(losses, logits, wanted)
    return results


def outside() -> list[bool]:
    """Whether the loss of a target that is no token is a number."""
    logits, _ = logits_of(3, 50, torch.float32)
    losses = softmax_triton.cross_entropy_(logits, torch.tensor([-100, 49, 50]), gradient=True)
    return losses.isfinite().tolist()


def shared() -> dict[str, Any]:
    """Two shares of a vocabulary, one after the other: what they agree on is put together by hand."""
    results = {}
    for dtype in DTYPES:
        logits, targets = logits_of(5, 1025, dtype)
        wanted, parts, first = expected(logits, targets), logits.split(1000, dim=1), [targets, targets - 1000]
        maxima, totals, at_target = zip(*map(softmax_triton.softmax_statistics, parts, first), strict=True)
        largest = torch.stack(maxima).amax(0)
        total = sum(part_total * (most - largest).exp() for part_total, most in zip(totals, maxima, strict=True))
        for part, positions in zip(parts, first, strict=True):
            softmax_triton.softmax_gradient_(part, positions, largest, total)
        results[str(dtype)] = errors(total.log() - (sum(at_target) - largest), logits, wanted)
    return results


def whole() -> dict[str, Any]:
    """The loss of a head by operations, eager and as a graph, against torch: loss and both gradients."""

    def of(loss_of: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(rows, 16, generator=generator).requires_grad_() for rows in (37, 50))
        loss = loss_of(hidden, weight, torch.randint(50, (37,), generator=generator))
        return [loss.detach(), *torch.autograd.grad(loss * 3, (hidden, weight))]

    usual = of(lambda hidden, weight, targets: F.cross_entropy(hidden @ weight.T, targets))
    ours, of_share = linear_cross_entropy.LinearCrossEntropy(), linear_cross_entropy.LinearCrossEntropy()
    of_share.share = softmax.VocabularyShare(0, torch.clone, torch.clone)
    ways = {
        "eager": ours,
        "graph": torch.compile(ours, fullgraph=True, backend="aot_eager"),
        "share": of_share,
        "graph of a share": torch.compile(of_share, fullgraph=True, backend="aot_eager"),
    }
    with (
        mock.patch.object(softmax, "has_kernels", yes),
        mock.patch.object(linear_cross_entropy, "has_wide_products", yes),
        mock.patch.multiple(linear_cross_entropy, LOGITS_CPU=1, LEAST_ROWS=8),
    ):
        return {
            name: max((ours - other).abs().max().item() for ours, other in zip(of(way), usual, strict=True))
            for name, way in ways.items()
        }


if __name__ == "__main__":
    print(json.dumps({subject.__name__: subject() for subject in (ordinary, extreme, outside, shared, whole)}))
