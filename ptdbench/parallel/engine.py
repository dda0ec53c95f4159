"""What turns a batch into gradients, whatever the layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

#: Multiplies a loss by the loss scale before its backward pass.
Scale = Callable[[Tensor], Tensor]

#: Makes an optimizer of parameters.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _nothing() -> None:
    """A module whose weights lie where they belong."""


@dataclass(frozen=True)
class Part:
    """A model, or one stage of it, as :func:`ptdbench.parallel.apply.apply` lays it out.

    Attributes:
        module: The bare module: its parameters have the names that they have in the whole model.
        runner: What is called in its place: the module itself, or DDP around it.
        deferred: Context of a forward and a backward pass after which gradients are not communicated yet.
        settles_after: Backward passes after which all further ones do the same operations in the same order.
        release: Frees what a forward pass without a backward pass has gathered.
    """

    module: nn.Module
    runner: nn.Module
    deferred: Callable[[], AbstractContextManager[object]] = nullcontext
    settles_after: int = 0
    release: Callable[[], None] = _nothing


class Engine(ABC):
    """One rank's share of the work of a step.

    Attributes:
        module: What this rank trains, bare: the model, its shards or its stages.
        owns_loss: Whether this rank's loss is the one that counts for its replica; one rank of each replica owns it.
        rehearsals: Calls of :meth:`gradients` after which all further ones do the same operations in the same order.
    """

    module: nn.Module
    owns_loss: bool
    rehearsals: int

    @abstractmethod
    def gradients(self, inputs: Tensor, targets: Tensor, scale: Scale) -> Tensor:
        """Forward and backward of this replica's share of a batch; leaves averaged gradients in ``.grad``.

        Args:
            inputs: The replica's samples, ``(replica_batch, ...)``, on this rank's device.
            targets: Their targets, ``(replica_batch, ...)``.
            scale: Multiplies a loss by the loss scale before its backward pass.

        Returns:
            The replica's mean loss as a detached fp32 scalar; zero on a rank that does not own it.
        """

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradient of all weights of the model, on every rank; a scalar.

        Called in all ranks, after :meth:`gradients`.
        """

    @abstractmethod
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """The forward pass alone, without gradients; all ranks call it equally often.

        Args:
            inputs: This replica's samples, ``(any number, ...)``, on this rank's device.
            targets: Their targets, or ``None``.

        Returns:
            On a rank that owns the loss what the model returns: its outputs, or with targets their mean loss, a scalar;
            else ``None``.
        """

    def optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """The optimizer of what this rank trains."""
        return make(self.module.parameters())

    def rehearse(self, inputs: Tensor, targets: Tensor, scale: Scale) -> None:
        """Compute gradients until the engine has settled, and drop them; nothing else changes.

        The first passes of an engine may differ from all later ones: DDP rebuilds its buckets after the first backward
        pass, under ``static_graph`` after the second. Without this, the first steps of a resumed run would differ in
        their last bits from the same steps of a run that was not interrupted.

        Args:
            inputs: As for :meth:`gradients`.
            targets: As for :meth:`gradients`.
            scale: As for :meth:`gradients`.
        """
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        with torch.random.fork_rng(devices=[inputs.device] if inputs.device.type == "cuda" else []):
            for _ in range(self.rehearsals):
                self.gradients(inputs, targets, scale)
                self.module.zero_grad()
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)


class Accumulating(Engine):
    """The engine of a rank that runs the whole model: micro-batch after micro-batch.

    Args:
        part: The model; its runner is called as ``runner(inputs, targets)`` and returns a mean loss.
        micro_batch: Samples of one forward and backward pass.
    """

    owns_loss = True

    def __init__(self, part: Part, micro_batch: int) -> None:
        self.module = part.module
        self.rehearsals = part.settles_after
        self._part = part
        self._micro_batch = micro_batch

    def gradients(self, inputs: Tensor, targets: Tensor, scale: Scale) -> Tensor:
        """See :meth:`Engine.gradients`."""
        pieces = list(zip(inputs.split(self._micro_batch), targets.split(self._micro_batch), strict=True))
        total = torch.zeros((), device=inputs.device)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            with nullcontext() if number == len(pieces) else self._part.deferred():
                loss = self._part.runner(some_inputs, some_targets) / len(pieces)
                scale(loss).backward()
            total += loss.detach()
        return total

    def gradient_norm(self) -> Tensor:
        """See :meth:`Engine.gradient_norm`; replicas have the same gradients, and shards bring their parts together."""
        return norm_of(self.module.parameters())

    @torch.no_grad()
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`Engine.outputs`; not through DDP, which would let the replicas wait for each other."""
        try:
            return self.module(inputs) if targets is None else self.module(inputs, targets)
        finally:
            self._part.release()


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The Euclidean norm of the gradients of these parameters, whole or in shards; a scalar, the same on all ranks."""
    norm = get_total_norm(parameter.grad for parameter in parameters if parameter.grad is not None)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
