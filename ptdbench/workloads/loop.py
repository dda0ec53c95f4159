"""The step loop: one optimizer step after another, each under the clock, and nothing else under it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from ptdbench.data.protocol import Data
from ptdbench.measure import clock, memory
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.layout import Layout
from ptdbench.parallel.precision import AgreedGradScaler

#: Steps between two collections of garbage. The collector is off inside steps, where it would strike at random.
COLLECT_EVERY = 100


def collect_garbage() -> None:
    """Collect garbage, and exempt what survives from later collections, until ``gc.unfreeze()``.

    A collection that goes through everything torch has imported takes as long as a step of a small model.
    """
    gc.collect()
    gc.freeze()


class StepLoop:
    """Trains step by step.

    Attributes:
        engine: Turns a batch into gradients.
        optimizer: Over the engine's parameters.
        replica: Which share of the batch is this rank's.
        first_step: Steps that were done before this loop: it goes on after a checkpoint.
        losses: This rank's share of each step's loss, on the device: reading one waits for it.
        memory_bytes: Memory in use after each step.
        clock: Holds the steps' times.

    Args:
        engine: Turns a batch into gradients.
        optimizer: Over the parameters of ``engine.module``.
        data: Where the samples come from; prepared.
        layout: How the global batch falls onto the ranks.
        replica: Which share of it is this rank's.
        device: This rank's device.
        scale: Whether losses are scaled, as fp16 needs.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        data: Data,
        layout: Layout,
        replica: int,
        device: torch.device,
        scale: bool = False,
    ) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self._data = data
        self._layout = layout
        self.replica = replica
        self._device = device
        self._scaler = AgreedGradScaler(device.type, enabled=scale)
        self.first_step = 0
        self.clock = clock.for_device(device)
        self.losses: list[Tensor] = []
        self.memory_bytes: list[int] = []

    @property
    def done(self) -> int:
        """Steps of the run that are done, those before this loop included."""
        return self.first_step + len(self.losses)

    def go_on(self, first_step: int, scaler: dict[str, Any]) -> None:
        """Begin after ``first_step`` steps, whose weights and optimizer state are in place."""
        self.first_step = first_step
        if scaler and self._scaler.is_enabled():
            self._scaler.load_state_dict(scaler)

    def scaler_state(self) -> dict[str, Any]:
        """The state of loss scaling, for a checkpoint; empty where losses are not scaled."""
        return self._scaler.state_dict()

    def rehearse(self) -> None:
        """Compute one step's gradients and throw them away; nothing else changes.

        DistributedDataParallel puts its gradients into other buckets after its first backward pass. A sum over three or
        more ranks is rounded by where a number lies in its bucket: a run that goes on after a checkpoint would differ
        in the last bit of its first step from one that was never interrupted.
        """
        buffers = [buffer.clone() for buffer in self.engine.module.buffers()]
        chance = torch.get_rng_state()
        self.engine.gradients(*self._batch(self.done), self._scaler.scale)
        self.engine.module.zero_grad()
        torch.set_rng_state(chance)
        for buffer, before in zip(self.engine.module.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def step(self) -> None:
        """One optimizer step; on a GPU its work is queued when this returns."""
        number = self.done
        self.clock.start()
        inputs, targets = self._batch(number)
        loss = self.engine.gradients(inputs, targets, self._scaler.scale)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        self.clock.stop()
        self.losses.append(loss)
        self.memory_bytes.append(memory.current_bytes(self._device))
        if len(self.losses) % COLLECT_EVERY == 0:
            collect_garbage()

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._data.samples(*self._layout.rows(number, self.replica))
        if self._device.type == "cpu":
            return inputs, targets
        return (
            inputs.pin_memory().to(self._device, non_blocking=True),
            targets.pin_memory().to(self._device, non_blocking=True),
        )
