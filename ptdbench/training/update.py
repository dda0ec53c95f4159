"""From gradients to new weights: loss scaling, clipping, learning rate, optimizer, average of weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_

from ptdbench.optim.averaging import WeightAverage
from ptdbench.optim.schedules import Schedule
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.precision import AgreedGradScaler
from ptdbench.setup.config import Train


class Update:
    """Runs optimizer steps.

    Attributes:
        optimizer: Over the engine's parameters.
        learning_rates: Of each step since the last :meth:`forget`; ``optimizer.lr`` times the schedule's factor.
        gradient_norms: Of each such step, before clipping, on the device; empty without clipping.

    Args:
        engine: Computes the gradients.
        optimizer: New, over the engine's parameters.
        schedule: The learning rate schedule.
        asked: The options of ``train``: steps, clipping and averaging.
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
        # Where the weights are, which offloading keeps on the host: nothing there waits for what is copied to it.
        held = next((weight.device for group in optimizer.param_groups for weight in group["params"]), device)
        self._scaler = AgreedGradScaler(held.type, enabled=scale)
        self._average = WeightAverage(optimizer, asked.ema, engine.share_weights) if asked.ema else None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the loss scale, for the backward pass."""
        return self._scaler.scale(loss)

    def __call__(self, step: int) -> None:
        """Apply and clear the gradients of step ``step``, counted over the whole run."""
        # The profiling pass trains on when the schedule has ended.
        factor = self._schedule.factor(min(step, self._asked.steps - 1), self._asked.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.learning_rates.append(self.optimizer.defaults.get("lr", self._rates[0]) * factor)
        if self._asked.clip_norm:
            self._clip(self._asked.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """Discard the learning rates and gradient norms recorded so far."""
        self.learning_rates.clear()
        self.gradient_norms.clear()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has its averages over the steps, if these are kept."""
        return self._average.in_place() if self._average else nullcontext()

    def load_scaler(self, state: dict[str, Any]) -> None:
        """Restore the state of loss scaling from a checkpoint."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)

    def scaler_state(self) -> dict[str, Any]:
        """The state of loss scaling, for a checkpoint; empty without loss scaling."""
        return self._scaler.state_dict()

    def _clip(self, most: float) -> None:
        """Clip by the norm over all ranks: clipping each rank by its own norm would change the direction."""
        self._scaler.unscale_(self.optimizer)
        norm = self._engine.gradient_norm()
        alike: dict[DeviceMesh | None, list[nn.Parameter]] = {}  # torch multiplies those of one mesh at once
        for weight in self._engine.module.parameters():
            alike.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
        for weights in alike.values():
            clip_grads_with_norm_(weights, most, norm)
        self.gradient_norms.append(norm)
