"""The step loop: runs optimizer steps and times nothing but them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptdbench.data.feed import Feed
from ptdbench.measure import clock, memory
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.mesh import Mesh
from ptdbench.training.update import Update

#: Steps between garbage collections. The collector is off during steps, where it would distort timings.
COLLECT_EVERY = 100


def collect_garbage() -> None:
    """Collect garbage, and exempt surviving objects from later collections until ``gc.unfreeze()``.

    A collection over everything that torch has imported takes as long as a step of a small model.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Steps:
    """Measurements of one rank, one item per step.

    Attributes:
        losses: This rank's share of the loss, on the device.
        learning_rates: ``optimizer.lr`` times the factor of the schedule.
        gradient_norms: Before clipping, on the device; empty without clipping.
        wait_seconds: Time spent waiting for the batch.
        memory_bytes: Memory in use after the step.
        seconds: Duration of the step.
    """

    losses: list[Tensor]
    learning_rates: list[float]
    gradient_norms: list[Tensor]
    wait_seconds: list[float]
    memory_bytes: list[int]
    seconds: list[float]


class StepLoop:
    """Runs optimizer steps.

    Attributes:
        engine: Turns a batch into gradients.
        update: Turns gradients into new weights.
        feed: Supplies the batches.
        mesh: The mesh of ranks; ``None`` for a loop without others.
        replicas: Process group of the ranks with replicas of this rank's part; ``None`` without a mesh.
        replica: This rank's index among them, which selects its share of the batch.
        first_step: Number of steps done before this loop, when resumed from a checkpoint.
        losses: This rank's share of each undrained step's loss, on the device; reading one synchronizes.
        memory_bytes: Memory in use after each undrained step.
        clock: Times of the undrained steps.

    Args:
        engine: Turns a batch into gradients.
        update: Turns gradients into new weights.
        feed: Supplies this rank's batches.
        device: This rank's device.
        mesh: The mesh of ranks; ``None`` for a loop without others.
    """

    def __init__(
        self,
        engine: Engine,
        update: Update,
        feed: Feed,
        device: torch.device,
        mesh: Mesh | None = None,
    ) -> None:
        self.engine = engine
        self.update = update
        self.feed = feed
        self.mesh = mesh
        self.replicas = mesh.batch.get_group() if mesh else None
        self.replica = mesh.batch.get_local_rank() if mesh else 0
        self._memory = memory.in_use(device)
        self.first_step = 0
        self.clock = clock.for_device(device)
        self.losses: list[Tensor] = []
        self.memory_bytes: list[int] = []
        self._drained = 0

    @property
    def taken(self) -> int:
        """Number of steps done by this loop."""
        return self._drained + len(self.losses)

    @property
    def done(self) -> int:
        """Number of steps done by the run, including those before this loop."""
        return self.first_step + self.taken

    @property
    def finished(self) -> int:
        """Number of steps of the run that the device has finished; never blocks, and in any thread."""
        return self.first_step + self._drained + self.clock.finished()

    def resume(self, first_step: int, scaler: dict[str, Any]) -> None:
        """Continue after ``first_step`` steps; weights and optimizer state are already restored."""
        self.first_step = first_step
        self.update.load_scaler(scaler)

    def rehearse(self) -> None:
        """Let the engine reach its steady state on the next step's batch; no training state changes."""
        self.engine.rehearse(*self.feed.peek(self.done), self.update.scale)

    def step(self) -> None:
        """Run one optimizer step; on a GPU its work is queued when this returns."""
        number = self.done
        self.clock.start()
        inputs, targets = self.feed(number)
        loss = self.engine.gradients(inputs, targets, self.update.scale)
        self.update(number)
        self.clock.stop()
        self.losses.append(loss)
        self.memory_bytes.append(self._memory())
        if self.taken % COLLECT_EVERY == 0:
            collect_garbage()

    def drain(self) -> Steps:
        """Return and release the measurements of the steps since the last call."""
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
