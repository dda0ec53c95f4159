"""The engine: turns a batch into gradients under any layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import get_total_norm

from ptdbench.kernels.copies import Copies
from ptdbench.local_part import local_part
from ptdbench.models.state import Modes, preserved
from ptdbench.nested import split
from ptdbench.parallel.experts import Routing

#: Multiplies a loss by the loss scale before its backward pass.
Scale = Callable[[Tensor], Tensor]

#: Makes an optimizer of parameters and their full names in the model.
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class LaidOutModule:
    """A model, or one stage of it, as :func:`ptdbench.parallel.apply.apply` lays it out."""

    module: nn.Module  #: The bare module, whose parameters have their names in the whole model.
    runner: nn.Module  #: The callable that runs it: the module itself, or DDP around it.
    #: Context of a forward and backward pass that does not communicate gradients.
    deferred: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Context of all passes of a step, which explains errors in communicating gradients, or splits the loss.
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Averages the replicas' gradients after backward passes of the module instead of the runner.
    average: Callable[[], None] = lambda: None
    settles_after: int = 0  #: Backward passes until all further ones run the same operations in the same order.
    release: Callable[[], None] = lambda: None  #: Frees weights gathered by a forward pass without a backward pass.
    begin: Callable[[Tensor], None] = lambda _: None  #: Begins a step, given the factor of each micro-batch's loss.
    settle: Callable[[], None] = lambda: None  #: Completes the gradients after the last backward pass of a step.
    routing: Routing | None = None  #: For a model with experts: the counts of tokens routed to them.
    #: Lets an optimizer update only this rank's part of the weights, if replicas share its state.
    attach: Callable[[torch.optim.Optimizer], object] = lambda _: None
    copies: Copies | None = None  #: Narrow copies of the weights to compute with, if the compute dtype is narrow.


class Engine(ABC):
    """One rank's share of the work of a step."""

    module: nn.Module  #: The bare module that this rank trains: the model, its shards or its stages.
    parts: Sequence[LaidOutModule]  #: The model, or the stages, as laid out.
    owns_loss: bool  #: Whether this rank computes its replica's loss; exactly one rank of each replica does.
    #: Calls of :meth:`gradients` until all further ones run the same operations in the same order.
    rehearsals: int
    modes: Modes  #: Switches between the modes of training, which it begins in, and of evaluation.
    written: Sequence[str] = ()  #: Names of weights that a forward pass changes in place, for :meth:`rehearse`.

    @abstractmethod
    def gradients(self, inputs: Any, targets: Tensor, scale: Scale) -> Tensor:
        """Run forward and backward on this replica's share of a batch, leaving averaged gradients in ``.grad``.

        Args:
            inputs: The replica's samples, tensors ``(replica_batch, ...)`` on this rank's device, as the model takes
                them.
            targets: Their targets, ``(replica_batch, ...)``.
            scale: Multiplies a loss by the loss scale before its backward pass.

        Returns:
            The replica's mean loss as a detached fp32 scalar; zero on a rank that does not own it.
        """

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients, a scalar equal on all ranks; called in all, after a backward."""

    @abstractmethod
    def outputs(self, inputs: Any, targets: Tensor | None = None) -> Tensor | None:
        """Run only the forward pass, without gradients; all ranks must make the same number of calls.

        Args:
            inputs: This replica's samples, ``(any number, ...)``, on this rank's device.
            targets: Their targets, or ``None``.

        Returns:
            On a rank that owns the loss, the model's outputs, or with targets the scalar mean loss; else ``None``.
        """

    def optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Create the optimizer of this rank's parameters."""
        optimizer = make(self.module.named_parameters())
        for part in self.parts:
            part.attach(optimizer)
        return optimizer

    def routed(self) -> tuple[dict[str, list[float]], list[float]]:
        """Return each expert's choices by router, and the load of the fullest rank per part; called in all ranks."""
        routings = [part.routing for part in self.parts if part.routing]
        counts = {name: total for routing in routings for name, total in routing.totals().items()}
        return counts, [ratio for routing in routings if (ratio := routing.fullest()) is not None]

    def rehearse(self, inputs: Any, targets: Tensor, scale: Scale) -> None:
        """Compute and discard gradients until the engine reaches its steady state; nothing else changes.

        The first passes of an engine may differ from later ones: DDP rebuilds its buckets after the first backward
        pass, under ``static_graph`` after the second. Without this, the first steps of a resumed run would not be
        bitwise equal to those of an uninterrupted run. The arguments are as for :meth:`gradients`.
        """
        written = {weight: weight.detach().clone() for weight in map(self.module.get_parameter, self.written)}
        with preserved(self.module, targets.device), ExitStack() as untraced:
            for part in self.parts:
                if part.routing:
                    untraced.enter_context(part.routing.rehearsing())
            for _ in range(self.rehearsals):
                self.gradients(inputs, targets, scale)
                self.module.zero_grad()
        with torch.no_grad():
            for weight, value in written.items():
                weight.copy_(value)


class Accumulating(Engine):
    """The engine of a rank that runs the whole model, with gradient accumulation over micro-batches.

    Args:
        part: The model; its runner is called as ``runner(inputs, targets)`` and returns a mean loss.
        micro_batch: Samples of one forward and backward pass.
        owns_loss: Whether this rank's loss counts for its replica.
    """

    def __init__(self, part: LaidOutModule, micro_batch: int, *, owns_loss: bool = True) -> None:
        self.module = part.module
        self.owns_loss = owns_loss
        self.parts = [part]
        self.rehearsals = part.settles_after
        self._part = part
        self._micro_batch = micro_batch

    def gradients(self, inputs: Any, targets: Tensor, scale: Scale) -> Tensor:
        """See :meth:`Engine.gradients`."""
        pieces = split((inputs, targets), self._micro_batch)
        total = torch.zeros((), device=targets.device)
        self._part.begin(scale(torch.ones((), device=targets.device) / len(pieces)))
        with self._part.around():
            for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
                with nullcontext() if number == len(pieces) else self._part.deferred():
                    loss = self._part.runner(some_inputs, some_targets) / len(pieces)
                    scale(loss).backward()
                if self.owns_loss:
                    total += loss.detach()
        self._part.settle()
        return total

    def gradient_norm(self) -> Tensor:
        """See :meth:`Engine.gradient_norm`; replicas have the same gradients, and shards are reduced."""
        return norm_of(self.module.parameters())

    @torch.no_grad()
    def outputs(self, inputs: Any, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`Engine.outputs`; not through DDP, which would synchronize the replicas."""
        try:
            with self._part.around():
                outputs = self.module(inputs) if targets is None else self.module(inputs, targets)
        finally:
            self._part.release()
        return outputs if self.owns_loss else None


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm of these parameters' gradients, whole or sharded; a scalar, the same on all ranks.

    Gradients with the same mesh and placements share one all-reduce; torch would run one for each.
    """
    alike: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        spread = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        alike.setdefault(spread, []).append(local_part(gradient))
    squares = []
    for spread, gradients in alike.items():
        square = _square_of(gradients)
        if spread:
            mesh, placements = spread
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return sum(squares, start=torch.zeros(())).sqrt()


def _square_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of tensors, in fp32.

    On a CPU torch accumulates a tensor in only a few fp32 sums: the norm of 40 million elements is 0.3 % too small, of
    their shards less. So on a CPU each row is reduced first.
    """
    if gradients[0].is_cuda:
        return get_total_norm(gradients).square()
    matrices = [gradient.flatten(1) if gradient.dim() > 1 else gradient.view(1, -1) for gradient in gradients]
    rows = [torch.linalg.vector_norm(matrix, dim=1) for matrix in matrices]
    return torch.cat(rows).double().square().sum().float()
