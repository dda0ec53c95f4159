"""The step loop: runs optimizer steps, from gradients to new weights, and times nothing else."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from ptdbench.data.feed import Feed
from ptdbench.grouping import grouped
from ptdbench.measure import memory, timing
from ptdbench.optim.schedules import Schedule
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.precision import AgreedGradScaler
from ptdbench.setup.config import Train


class Update:
    """Turns gradients into new weights, with clipping as in the ``train`` options.

    ``optimizer``: newly created over the engine's parameters; ``scale``: whether to scale losses, as fp16 needs, by a
    ``scaler``.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        options: Train,
        device: torch.device,
        scale: bool = False,
        scaler: type[torch.amp.GradScaler] = AgreedGradScaler,
    ) -> None:
        self.optimizer = optimizer
        #: ``optimizer.lr`` times the schedule's factor, for each step since the last :meth:`forget`.
        self.learning_rates: list[float] = []
        #: Norms before clipping of the same steps, on the device; empty without clipping.
        self.gradient_norms: list[Tensor] = []
        self.before_change: Callable[[], None] = lambda: None  #: Called before weights or optimizer state change.
        self._engine = engine
        self._schedule = schedule
        self._options = options
        self._rates = [group["lr"] for group in optimizer.param_groups]
        # On the device of the weights: with offloading that is the host, which would not wait for async copies.
        held = next((weight.device for group in optimizer.param_groups for weight in group["params"]), device)
        self.scaler = scaler(held.type, enabled=scale)  #: Scales losses, if that is enabled.

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for the backward pass."""
        return self.scaler.scale(loss)

    def __call__(self, step: int) -> None:
        """Apply and clear the gradients of step ``step``, counted over the whole run."""
        # The profiling pass continues training after the end of the schedule.
        factor = self._schedule.factor(min(step, self._options.steps - 1), self._options.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.learning_rates.append(self.optimizer.defaults.get("lr", self._rates[0]) * factor)
        if self._options.clip_norm:
            self._clip(self._options.clip_norm)
        self.before_change()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """Discard the learning rates and gradient norms recorded so far."""
        self.learning_rates.clear()
        self.gradient_norms.clear()

    def _clip(self, most: float) -> None:
        """Clip by the global norm; local norms would change the direction."""
        self.scaler.unscale_(self.optimizer)
        norm = self._engine.gradient_norm()
        # torch scales weights of one mesh in one operation.
        alike = grouped((getattr(weight, "device_mesh", None), weight) for weight in self._engine.module.parameters())
        for weights in alike.values():
            clip_grads_with_norm_(weights, most, norm)
        self.gradient_norms.append(norm)


#: Steps between garbage collections. The collector is off during steps, where it would distort timings.
COLLECT_EVERY = 100


def collect_garbage() -> None:
    """Collect garbage, and exempt survivors from later collections until ``gc.unfreeze()``.

    Traversing all objects that torch has imported takes as long as a step of a small model.
    """
    gc.collect()
    gc.freeze()


class StepLoop:
    """Runs optimizer steps."""

    def __init__(self, engine: Engine, update: Update, feed: Feed, device: torch.device, mesh: Mesh) -> None:
        self.engine = engine  #: Turns a batch into gradients.
        self.update = update  #: Turns gradients into new weights.
        self.feed = feed  #: Supplies this rank's batches.
        self.mesh = mesh  #: The mesh of ranks.
        self.replica = mesh.dp.get_local_rank()  #: This rank's replica, which selects its share of the batch.
        self._memory = memory.in_use(device)
        self.first_step = 0  #: Number of steps before this loop, if resumed from a checkpoint.
        self.clock = timing.clock_for(device)  #: Times of the undrained steps.
        #: This rank's share of each undrained step's loss, on the device; reading one synchronizes.
        self.losses: list[Tensor] = []
        self.memory_bytes: list[int] = []  #: Memory in use after each undrained step.
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
        """Number of steps of the run that the device has finished; never blocks, and is thread-safe."""
        return self.first_step + self._drained + self.clock.finished()

    def rehearse(self) -> None:
        """Let the engine reach its steady state on the next step's batch; no training state changes."""
        self.engine.rehearse(*self.feed.peek(self.done), self.update.scale)

    def step(self) -> None:
        """Run one optimizer step; on a GPU, return when its work is queued."""
        number = self.done
        self.clock.start()
        inputs, targets = self.feed(number)
        if self.clock.finished() < len(self.losses):  # a GPU with steps left in its queue did not wait for data
            self.feed.wait_seconds[-1] = 0.0
        loss = self.engine.gradients(inputs, targets, self.update.scale)
        self.update(number)
        self.clock.stop()
        self.losses.append(loss)
        self.memory_bytes.append(self._memory())
        if self.taken % COLLECT_EVERY == 0:
            collect_garbage()

    def forget(self) -> None:
        """Release the measurements of all undrained steps, which count as drained from now on."""
        self._drained += len(self.losses)
        self.clock.forget()
        self.update.forget()
        self.feed.forget()
        self.losses.clear()
        self.memory_bytes.clear()
