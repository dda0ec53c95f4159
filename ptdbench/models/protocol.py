"""The protocol of a model, by which a strategy can lay it out without knowing its class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch.nn.functional as F
from torch import Generator, Tensor, nn

#: What a module can be to ranks that share the work of one sample, see :class:`Role`.
Kind = Literal[
    "outputs", "inputs", "vocabulary", "loss", "entry", "stream", "each", "outputs_of_each", "tokens",
    "experts", "positions", "attention",
]  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What a module is to ranks that share the work of one sample, under tensor, context or expert parallelism."""

    #: Under tensor parallelism:
    #:
    #: - ``outputs``: a linear layer of which each rank computes some of the outputs, from all inputs.
    #: - ``inputs``: a linear layer of which each rank takes some of the inputs; the ranks' outputs are added up, and
    #:   the bias once.
    #: - ``vocabulary``: an embedding or a projection to logits, of which each rank has some tokens.
    #: - ``loss``: a ``ptdbench.models.linear_cross_entropy.LinearCrossEntropy`` over a cut vocabulary.
    #: - ``entry``: a module whose output goes only to cut layers and to a loss; if the ranks share the positions of a
    #:   sequence outside of cut layers, it works on a rank's share of ``[batch, length, ...]``.
    #: - ``stream``: a module whose output, of that form, begins what is shared so.
    #: - ``each``: a module that is not cut between an ``entry`` and what ``inputs`` adds up: it is applied to what a
    #:   cut layer computes, or each rank applies it to all of what the entry hands over, for its own units.
    #: - ``outputs_of_each``: as ``outputs``, of what such a module hands over.
    #: - ``tokens``: a module from ``[batch, length, ...]`` to the same that is not cut: ranks share its positions,
    #:   whether they share them elsewhere or not.
    #:
    #: Under expert parallelism:
    #:
    #: - ``experts``: a module that is called with tokens ``[tokens, ...]`` in the order of their experts and the number
    #:   of each expert's, ``[units]``, and whose parameters are stacked by expert.
    #:
    #: Under context parallelism:
    #:
    #: - ``positions``: a module that is called with the positions of tokens in their sequence, ``[length]`` in int64.
    #: - ``attention``: a module that is called with queries, keys and values, ``[batch, heads, length, head width]``,
    #:   and returns their mixture in that form; the only one in which tokens see each other.
    kind: Kind
    units: int = 0  #: Number of indivisible units, which ranks must divide evenly; with 0 the features that are cut.
    unit: str = "features"  #: What they are, as an error names them, such as ``heads``.
    #: Of ``attention``: whether it is softmax attention to a position and those before, scaled by the root of the head
    #: width and without dropout, which ring attention computes in its place.
    is_causal: bool = False


class FlopsUnknown(Exception):
    """The FLOPs of a model are unknown; the message is the reason, for a report."""


@runtime_checkable
class Model(Protocol):
    """A plain ``nn.Module`` with seven methods, independent of ranks, devices and sharding.

    Models are built on the meta device, so that a trillion parameters take no memory before they are sharded, and are
    initialized by :func:`ptdbench.models.materialize.materialize`.
    """

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The outputs, or with ``targets`` the mean loss: a scalar in fp32 under every precision."""
        ...

    def layers(self) -> list[nn.Module]:
        """The repeated blocks in order: the unit of sharding, recomputation and regional compilation."""
        ...

    def parts(self) -> dict[str, nn.Module] | None:
        """The model as an ordered chain, keyed by each part's full name in the model.

        ``forward(x, t)`` equals feeding ``x`` through each part in turn, where the last is called as
        ``last(x, t)``. Pipeline stages are runs of consecutive parts. ``None`` if the model is not a chain.

        ``forward`` calls those that are submodules: compilation and FSDP take hold of the first and the last of them.
        """
        ...

    def roles(self) -> Mapping[str, Role]:
        """Return the roles of modules for ranks that share a sample's work, by full name; no role: the same to all.

        Divided by them, on any number of ranks that divides their units, the model computes the same as on one rank.
        Empty if it cannot be divided.
        """
        ...

    def train_flops(self) -> dict[str, float]:
        """FLOPs of forward and backward for ONE sample, by part (the keys of :meth:`parts`).

        A multiply-add is 2 FLOPs; only products of matrices and convolutions count; recomputation does not.

        Raises:
            FlopsUnknown: They are unknown, with the reason.
        """
        ...

    def tied(self) -> list[tuple[str, str]]:
        """Pairs of full parameter names in different parts that are one weight; the first gives the value."""
        ...

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill one parameter or buffer in place with its initial value.

        Args:
            name: Its full name in the model.
            tensor: Its storage, of any device.
            generator: The only source of randomness, on the tensor's device.
        """
        ...


class Piece(nn.Module):
    """A part of a chain that is not one submodule: what it runs, and the submodules whose weights it uses."""

    def __init__(self, members: Mapping[str, nn.Module], run: Callable[..., Tensor]) -> None:
        super().__init__()
        #: The submodules by their full names; they are registered by whoever holds the piece.
        self.members = dict(members)
        self._run = run
        self.__dict__["_modules"] = {}

    def forward(self, *arguments: Any) -> Tensor:
        """Run it."""
        return self._run(*arguments)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights of its members."""
        for member in self.members.values():
            yield from member.parameters(recurse)


def members(name: str, part: nn.Module) -> Mapping[str, nn.Module]:
    """The submodules of a part, by their full names: of most parts, itself."""
    return part.members if isinstance(part, Piece) else {name: part}


def masked_flops(model: Model) -> float | None:
    """Of ``train_flops()``, those for what causal attention masks: half of its scores and of the mixing of values.

    With a window of W positions that is ``W² / 2`` of the ``T · W`` pairs that are counted. A model may say so in a
    method of this name; 0 means that it has no such attention, ``None`` that it is unknown.
    """
    stated = getattr(model, "masked_flops", None)
    return None if stated is None else stated()


def loss_of_outputs(model: Model) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What makes the mean loss of outputs and targets, where it depends on nothing else; ``None`` if it is not known.

    A model may have it as a method ``loss``, which spares an evaluation a second forward pass.
    """
    loss = getattr(model, "loss", None)
    return loss if callable(loss) else None


def only_loss(model: Model) -> bool:
    """Whether ``forward`` needs targets, and so gives no outputs; the models of the protocol do."""
    return getattr(model, "only_loss", False)


def module_of(model: Model) -> nn.Module:
    """The model as an ``nn.Module``: Python has no intersection types."""
    return cast(nn.Module, model)


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model without its own, as an fp32 scalar.

    Args:
        outputs: Floating point, any shape.
        targets: Floating point and of the same shape: mean squared error. Integer: cross entropy, with the
            classes in the last dimension of ``outputs`` where the other dimensions are those of ``targets``,
            else in the second, as :func:`torch.nn.functional.cross_entropy` has it. Of classes of -100, which it leaves
            out, the mean is over the others of a micro-batch, so that it depends on how samples are divided.

    Raises:
        ValueError: If floating-point targets have another shape than the outputs.
    """
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            raise ValueError(f"the outputs have shape {tuple(outputs.shape)}, the targets {tuple(targets.shape)}")
        return F.mse_loss(outputs.float(), targets.float())
    if outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return F.cross_entropy(outputs.float(), targets)
