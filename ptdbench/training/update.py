"""From gradients to new weights: loss scaling, clipping, the learning rate, the optimizer, the average of weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from ptdbench.optim.averaging import WeightAverage
from ptdbench.optim.schedules import Schedule
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.precision import AgreedGradScaler
from ptdbench.setup.config import Train


class Update:
    """Takes one optimizer step after another.

    Attributes:
        optimizer: Over the engine's parameters.
        learning_rates: Of each step that is not forgotten; of the first parameter group.
        gradient_norms: Of each such step, before clipping, on the device; empty where nothing is clipped.

    Args:
        engine: Has the gradients.
        optimizer: Fresh, over its parameters.
        schedule: How the learning rate changes.
        asked: Steps of the run, clipping and averaging.
        device: This rank's device.
        scale: Whether losses are scaled, as fp16 needs.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        asked: Train,
        device: torch.device,
        scale: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.learning_rates: list[float] = []
        self.gradient_norms: list[Tensor] = []
        self._engine = engine
        self._schedule = schedule
        self._asked = asked
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._scaler = AgreedGradScaler(device.type, enabled=scale)
        self._average = WeightAverage(optimizer, asked.ema) if asked.ema else None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as its backward pass should begin with it."""
        return self._scaler.scale(loss)

    def __call__(self, step: int) -> None:
        """Use up the gradients of step ``step``, counted over the whole run."""
        factor = self._schedule.factor(step, self._asked.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.learning_rates.append(self._rates[0] * factor)
        if self._asked.clip_norm:
            self._clip(self._asked.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """Forget the learning rates and gradient norms of the steps so far."""
        self.learning_rates.clear()
        self.gradient_norms.clear()

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the model has the average of its weights, where one is kept."""
        return self._average.in_place() if self._average else nullcontext()

    def load_scaler(self, state: dict[str, Any]) -> None:
        """Go on with the loss scale of a checkpoint."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)

    def scaler_state(self) -> dict[str, Any]:
        """The state of loss scaling, for a checkpoint; empty where losses are not scaled."""
        return self._scaler.state_dict()

    def _clip(self, most: float) -> None:
        """Shorten the gradient as a whole, over all ranks: each rank by itself would turn it into another direction."""
        self._scaler.unscale_(self.optimizer)
        norm = self._engine.gradient_norm()
        clip_grads_with_norm_(self._engine.module.parameters(), most, norm)
        self.gradient_norms.append(norm)
