"""An exponential moving average of the weights, which often evaluates better than the last weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ptdbench.local_part import local_part

#: The name of the average in the optimizer's state.
KEY = "average"


class WeightAverage:
    """Averages an optimizer's weights: after each step ``average = decay * average + (1 - decay) * weight``.

    The averages are part of the optimizer's state, and sharded, saved and loaded with it. An average starts with the
    weight after the first step. Steps that loss scaling skips do not count. Buffers, such as batch norm statistics, are
    not averaged.

    Args:
        optimizer: An optimizer without state.
        decay: Between 0 and 1.
        share: Broadcasts weights whose averages only one rank has; called in all ranks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, decay: float, share: Callable[[], None] = lambda: None
    ) -> None:
        self._optimizer = optimizer
        self._share = share
        self._rate = 1 - decay
        optimizer.register_step_post_hook(self._after_step)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which averages replace the weights, which are restored bit for bit on exit."""
        pairs = self._pairs()
        kept = [weight.clone() for weight, _ in pairs]
        for weight, average in pairs:
            weight.copy_(average)
        self._share()
        try:
            yield
        finally:
            for (weight, _), value in zip(pairs, kept, strict=True):
                weight.copy_(value)
        self._share()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        before = self._pairs()
        # Under loss scaling torch calls a fused optimizer even for steps to skip, and only the device knows which.
        skipped = getattr(self._optimizer, "found_inf", None)
        if skipped is not None and not before and skipped.item():  # waits for the device until there are averages
            return
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and KEY not in self._optimizer.state[weight]:
                    self._optimizer.state[weight][KEY] = weight.detach().clone()
        if before:
            weights, averages = zip(*before, strict=True)
            rate = self._rate if skipped is None else [self._rate * (1 - skipped)] * len(weights)
            torch._foreach_lerp_(averages, weights, rate)

    @torch.no_grad()  # so that DTensors return their local parts without a call of autograd
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the local parts of weights and their averages."""
        state = self._optimizer.state
        weights = [
            weight for group in self._optimizer.param_groups for weight in group["params"] if KEY in state[weight]
        ]
        return [(local_part(weight).detach(), local_part(state[weight][KEY])) for weight in weights]
