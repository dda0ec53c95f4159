"""Counts the FLOPs of any module, with tensors that have no values."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ptdbench.models.protocol import FlopsUnknown
from ptdbench.models.state import preserved, without_values
from ptdbench.nested import first_tensor, with_samples
from ptdbench.problems import first_line

#: Products of batches of matrices, as in attention.
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


@dataclass(frozen=True)
class Flops:
    """FLOPs of forward and backward pass for one sample."""

    total: float  #: All FLOPs; of windowed attention, only those within the window.
    masked: float | None  #: The part that causal attention masks; ``None`` if unknown.
    of_modules: Mapping[str, float]  #: Of the forward pass, by module, each including its submodules.


def count_train_flops(module: nn.Module, inputs: Any, targets: Tensor) -> Flops:
    """Count the FLOPs of a forward and backward pass for one sample with PyTorch's counter, without computing.

    Args:
        module: Called as ``module(inputs, targets)``; its own tensors are not changed.
        inputs: One sample, batch dimension included, on the meta device.
        targets: Its targets, likewise.

    Raises:
        FlopsUnknown: The module does not run on the meta device.
    """
    try:
        with preserved(module, whole=True):
            return _counted(module, inputs, targets, torch.device("meta"))
    except Exception as error:  # third-party code may raise anything
        reason = first_line(error)
    # Code that reads values often checks first if it is traced.
    with suppress(Exception), preserved(module, whole=True), FakeTensorMode(allow_non_fake_inputs=True):
        return _counted(module, inputs, targets, torch.device("cpu"))
    raise FlopsUnknown(f"the model has no train_flops(), and counting on the meta device failed: {reason}")


# A failure with fake tensors is reported in one line; suppress torch's log of the operation's traceback.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: "run meta for" not in record.getMessage())


class _BothPasses(nn.Module):
    """A forward and backward pass in one call, so that recomputation in the second sees the same tensors."""

    def __init__(self, module: nn.Module, between: Callable[[], None]) -> None:
        super().__init__()
        self.module = module
        self._between = between

    def forward(self, inputs: Any, targets: Tensor) -> None:
        loss = self.module(inputs, targets)
        self._between()
        loss.backward()


def _counted(module: nn.Module, inputs: Any, targets: Tensor, device: torch.device) -> Flops:
    """Count with tensors without values, on ``device``."""
    # The counter has no formula for some fused attention kernels and grouped products, and would count them as zero.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops})
    forward, of_modules = dict[str, int](), dict[str, float]()

    def note() -> None:
        forward.update(_batched(counter))
        prefix = f"{_BothPasses.__name__}.module."
        counts = {name: sum(by_operation.values()) / 2 for name, by_operation in counter.get_flop_counts().items()}
        of_modules.update({name.removeprefix(prefix): count for name, count in counts.items()})

    step = _BothPasses(module, note)
    # Counted on two samples, as batch norm refuses to train on one.
    two = with_samples((inputs, targets), 2, device)
    with counter, sdpa_kernel(SDPBackend.MATH):
        functional_call(step, without_values(step, device), two)
    outside, masked = _masked(step, forward, first_tensor(inputs).shape[-1])
    # Three passes, fewer if layers are frozen. Backward counts by module are not reliable: torch's module tracker loses
    # its place in the backward pass of a module that is called with keyword arguments only.
    passes = _batched(counter)["Global"] / (forward["Global"] or 1)
    total = counter.get_total_flops() - passes * outside
    return Flops(total / 2, None if masked is None else passes * masked / 2, of_modules)


def _grouped_flops(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product from its shapes, with the rows, or columns, of all groups."""
    groups = first[0] if len(first) > len(second) else 1  # they split the columns of the second matrix
    return 2 * math.prod(first) * second[-1] // groups


def _batched(counter: FlopCounterMode) -> dict[str, int]:
    """Return the FLOPs in batched products so far, by module, each including its submodules."""
    counts: dict[str, dict[Any, int]] = {"Global": {}} | counter.get_flop_counts()
    return {
        name: sum(flops for operation, flops in by_operation.items() if operation in _BATCHED)
        for name, by_operation in counts.items()
    }


def _masked(module: nn.Module, forward: Mapping[str, int], length: int) -> tuple[float, float | None]:
    """Return the forward FLOPs for pairs outside windows, and for pairs within that a causal mask excludes.

    Of ``T²`` pairs a window of W positions holds ``T · W``, of which a causal mask excludes ``W² / 2``; a two-sided
    window holds ``T · (2W - 1)``, as both sides include the position itself. ``forward`` has the FLOPs in batched
    products by module, submodules included; ``length`` is T. The second count is ``None`` if some products are not in
    modules that say whether they are causal.
    """
    stated = outside = masked = 0.0
    for name, part in module.named_modules():
        is_causal = getattr(part, "is_causal", None)
        flops = forward.get(f"{type(module).__name__}.{name}", 0)
        if not isinstance(is_causal, bool) or not flops:
            continue
        stated += flops
        window = _window(part) or length
        share = min(window if is_causal else 2 * window - 1, length) / length
        outside += flops * (1 - share)
        masked += flops * share**2 / 2 if is_causal else 0
    return outside, masked if stated == forward["Global"] else None


def _window(attention: nn.Module) -> int | None:
    """Return the positions a Hugging Face module attends to on each side, including its own; ``None``: all."""
    config = getattr(attention, "config", None)
    window = getattr(attention if hasattr(attention, "sliding_window") else config, "sliding_window", None)
    # Some classes set the window even in layers that attend to all positions.
    kinds: dict[Any, str] = dict(enumerate(getattr(config, "layer_types", None) or ()))
    is_sliding = getattr(attention, "is_sliding", True)
    if any("sliding" in kind for kind in kinds.values()):
        is_sliding = "sliding" in kinds.get(getattr(attention, "layer_idx", None), "sliding")
    return window if is_sliding and isinstance(window, int) else None
