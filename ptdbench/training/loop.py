"""The step loop: one optimizer step after another, each under the clock, and nothing else under it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.data.feed import Feed
from ptdbench.measure import clock, memory
from ptdbench.parallel.engine import Engine
from ptdbench.training.update import Update

#: Steps between two collections of garbage. The collector is off inside steps, where it would strike at random.
COLLECT_EVERY = 100


def collect_garbage() -> None:
    """Collect garbage, and exempt what survives from later collections, until ``gc.unfreeze()``.

    A collection that goes through everything torch has imported takes as long as a step of a small model.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Steps:
    """What one rank notes of steps that it has taken: of each one an item.

    Attributes:
        losses: This rank's share, on the device.
        learning_rates: Of the first parameter group.
        gradient_norms: Before clipping, on the device; empty where nothing is clipped.
        wait_seconds: How long the step has waited for its batch.
        memory_bytes: Memory in use after it.
        seconds: How long it took.
    """

    losses: list[Tensor]
    learning_rates: list[float]
    gradient_norms: list[Tensor]
    wait_seconds: list[float]
    memory_bytes: list[int]
    seconds: list[float]


class StepLoop:
    """Trains step by step.

    Attributes:
        engine: Turns a batch into gradients.
        update: Turns gradients into new weights.
        feed: Gives the batches.
        replicas: The ranks that hold replicas of what this rank holds, if there are more.
        replica: This rank's number among them: which share of the batch is its own.
        first_step: Steps that were done before this loop: it goes on after a checkpoint.
        losses: This rank's share of each undrained step's loss, on the device: reading one waits for it.
        memory_bytes: Memory in use after each undrained step.
        clock: Holds the undrained steps' times.

    Args:
        engine: Turns a batch into gradients.
        update: Turns gradients into new weights.
        feed: Gives this rank's batches.
        device: This rank's device.
        replicas: The ranks that hold replicas of what this rank holds; without them it is the only one.
    """

    def __init__(
        self,
        engine: Engine,
        update: Update,
        feed: Feed,
        device: torch.device,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine = engine
        self.update = update
        self.feed = feed
        self.replicas = replicas
        self.replica = dist.get_rank(replicas) if replicas else 0
        self._device = device
        self.first_step = 0
        self.clock = clock.for_device(device)
        self.losses: list[Tensor] = []
        self.memory_bytes: list[int] = []
        self._drained = 0

    @property
    def taken(self) -> int:
        """Steps that this loop has taken."""
        return self._drained + len(self.losses)

    @property
    def done(self) -> int:
        """Steps of the run that are done, those before this loop included."""
        return self.first_step + self.taken

    def go_on(self, first_step: int, scaler: dict[str, Any]) -> None:
        """Begin after ``first_step`` steps, whose weights and optimizer state are in place."""
        self.first_step = first_step
        self.update.load_scaler(scaler)

    def rehearse(self) -> None:
        """Let the engine settle on the next step's batch; nothing else changes."""
        self.engine.rehearse(*self.feed.peek(self.done), self.update.scale)

    def step(self) -> None:
        """One optimizer step; on a GPU its work is queued when this returns."""
        number = self.done
        self.clock.start()
        inputs, targets = self.feed(number)
        loss = self.engine.gradients(inputs, targets, self.update.scale)
        self.update(number)
        self.clock.stop()
        self.losses.append(loss)
        self.memory_bytes.append(memory.current_bytes(self._device))
        if self.taken % COLLECT_EVERY == 0:
            collect_garbage()

    def drain(self) -> Steps:
        """What this rank has noted of the steps since the last call; from now on nothing of it is held here."""
        noted = Steps(
            losses=list(self.losses),
            learning_rates=list(self.update.learning_rates),
            gradient_norms=list(self.update.gradient_norms),
            wait_seconds=list(self.feed.wait_seconds),
            memory_bytes=list(self.memory_bytes),
            seconds=self.clock.seconds(),
        )
        self._drained += len(self.losses)
        self.clock.forget()
        self.update.forget()
        self.feed.forget()
        self.losses.clear()
        self.memory_bytes.clear()
        return noted
