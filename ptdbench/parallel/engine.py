"""What a strategy makes of a model: something that turns a batch into gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from ptdbench.models.materialise import materialise
from ptdbench.models.protocol import Model
from ptdbench.parallel.layers import compile_each, recompute
from ptdbench.parallel.layout import Layout
from ptdbench.parallel.precision import Name


@dataclass(frozen=True)
class Setting:
    """Where and how a model is laid out.

    Attributes:
        mesh: The ranks, as :func:`ptdbench.parallel.mesh.build` arranges them.
        layout: How the batch falls onto them.
        device: This rank's device.
        precision: Format of the arithmetic.
        compile: Whether the layers are compiled.
        activation_checkpointing: ``full``: layers keep only their inputs and are run again in the backward pass.
        seed: What the weights are drawn from.
        channels_last: Whether images come with their channels last in memory.
    """

    mesh: DeviceMesh
    layout: Layout
    device: torch.device
    precision: Name = "fp32"
    compile: bool = False
    activation_checkpointing: Literal["none", "full"] = "none"
    seed: int = 0
    channels_last: bool = False

    def fill(self, model: Model, module: nn.Module, prefix: str = "") -> None:
        """Give ``module``, whose names in ``model`` begin with ``prefix``, its weights on this rank's device."""
        materialise(model, module, prefix=prefix, device=self.device, seed=self.seed)

    def fit(self, module: nn.Module) -> None:
        """Let the kernels of a module that has its weights lie in memory as the images do.

        Else their gradients would come in another order than they have, and DDP would copy each into its bucket. Shards
        have to be contiguous, and so do the messages of a pipeline.
        """
        if self.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def dress(self, layers: list[nn.Module]) -> None:
        """Recomputation first, so that the compiler sees it and can choose what to keep."""
        if self.activation_checkpointing == "full":
            recompute(layers)
        if self.compile:
            compile_each(layers)


class Engine(Protocol):
    """One rank's share of the work of a step.

    Attributes:
        module: What this rank trains: the model, its shards or its stage.
        rehearsals: Calls of :meth:`gradients` after which all further ones do the same operations in the same order.
    """

    module: nn.Module
    rehearsals: int

    def gradients(self, inputs: Tensor, targets: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward of this replica's share of a batch; leaves averaged gradients in ``.grad``.

        Args:
            inputs: The replica's samples, ``(replica_batch, ...)``, on this rank's device.
            targets: Their targets, ``(replica_batch, ...)``.
            scale: Multiplies a loss by the loss scale before its backward pass.

        Returns:
            The replica's mean loss as a detached fp32 scalar; zero on a rank that does not compute the loss.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradient of all weights of the model, on every rank; a scalar.

        Called in all ranks, after :meth:`gradients`.
        """
        ...

    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """The forward pass alone, without gradients; all ranks call it equally often.

        Args:
            inputs: This replica's samples, ``(any number, ...)``, on this rank's device.
            targets: Their targets, or ``None``.

        Returns:
            What the model returns: its outputs, or with targets their mean loss, a scalar; ``None`` on a rank that
            does not hold the model's end.
        """
        ...


Bracket = Callable[[bool], AbstractContextManager[None]]


def no_bracket(last: bool) -> AbstractContextManager[None]:
    """For a model whose gradients nobody else waits for."""
    return nullcontext()


@dataclass
class Accumulating:
    """The engine of every strategy that holds the whole model: micro-batch after micro-batch.

    Attributes:
        module: Called as ``module(inputs, targets)``, it returns a mean loss.
        micro_batch: Samples of one forward and backward.
        bracket: Context of one forward and backward, told whether it is the step's last: gradients are
            communicated in the last one only.
        rehearsals: See :class:`Engine`.
    """

    module: nn.Module
    micro_batch: int
    bracket: Bracket = no_bracket
    rehearsals: int = 0

    def gradients(self, inputs: Tensor, targets: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """See :meth:`Engine.gradients`."""
        pieces = list(zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        total = torch.zeros((), device=inputs.device)
        for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
            with self.bracket(number == len(pieces)):
                loss = self.module(some_inputs, some_targets) / len(pieces)
                scale(loss).backward()
            total += loss.detach()
        return total

    def gradient_norm(self) -> Tensor:
        """See :meth:`Engine.gradient_norm`; replicas have the same gradients, and shards bring their parts together."""
        return norm_of(self.module.parameters())

    @torch.no_grad()
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`Engine.outputs`."""
        # Not through DDP, which would let the replicas wait for each other.
        module = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        return module(inputs) if targets is None else module(inputs, targets)


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The Euclidean norm of the gradients of these parameters, whole or in shards; a scalar, the same on all ranks."""
    norm = get_total_norm(parameter.grad for parameter in parameters if parameter.grad is not None)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
