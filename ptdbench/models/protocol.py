"""The protocol of a model, which lets a strategy lay it out without knowing its class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ptdbench.problems import Problem, require, try_these

#: The roles of modules, see :class:`Role`.
Kind = Literal[
    "colwise", "rowwise", "vocabulary", "colwise_gather_output", "rowwise_split_input", "loss", "sequence", "scatter",
    "replicated", "local_colwise", "split_sequence",
    "experts", "positions", "attention",
]  # fmt: skip


@dataclass(frozen=True)
class Role:
    """The role of a module under tensor, context or expert parallelism, whose ranks share the work of one sample."""

    #: Under tensor parallelism:
    #:
    #: - ``colwise``: a column-wise linear layer: each rank computes some outputs, from all inputs.
    #: - ``rowwise``: a row-wise linear layer: each rank takes some inputs; the ranks' outputs are summed, and the bias
    #:   is added once.
    #: - ``colwise_gather_output``: like ``colwise``, but ranks gather the outputs: what takes them computes whole.
    #: - ``rowwise_split_input``: like ``rowwise``, but it is given whole inputs, and each rank takes some.
    #: - ``vocabulary``: an embedding or a projection to logits: each rank has some tokens.
    #: - ``loss``: an ``nn.CrossEntropyLoss``, or a ``ptdbench.kernels.linear_cross_entropy.LinearCrossEntropy``, over
    #:   a split vocabulary.
    #: - ``sequence``: a module whose output goes only to split layers and to a loss; under sequence parallelism it
    #:   works on a rank's share of ``[batch, length, ...]``.
    #: - ``scatter``: a module whose output, ``[batch, length, ...]``, sequence parallelism scatters over the ranks.
    #: - ``replicated``: a whole module between a ``sequence`` module and a ``rowwise`` layer: each rank applies it to
    #:   the outputs of a split layer, or to the whole output of the former, for its own units.
    #: - ``local_colwise``: like ``colwise``, after a ``replicated`` module.
    #: - ``split_sequence``: a whole module from ``[batch, length, ...]`` to the same shape: ranks split its positions,
    #:   with or without sequence parallelism.
    #:
    #: Under expert parallelism:
    #:
    #: - ``experts``: a module that is called with tokens ``[tokens, ...]`` ordered by expert and the number of tokens
    #:   of each expert, ``[units]``, and whose parameters are stacked by expert.
    #:
    #: Under context parallelism:
    #:
    #: - ``positions``: a module that is called with the positions of tokens in their sequence, ``[length]`` in int64.
    #: - ``attention``: a module that is called with queries, keys and values, ``[batch, heads, length, head width]``,
    #:   and returns their mixture in the same shape; the only module in which tokens interact.
    kind: Kind
    units: int = 0  #: Number of indivisible units, a multiple of the ranks; if 0, the features that are split.
    unit: str = "features"  #: Name of the units in errors, such as ``heads``.
    #: For ``attention``: whether it is causal softmax attention without dropout, scaled by the root of the head width,
    #: which ring attention can replace.
    is_causal: bool = False


#: Pairs of full parameter names that are one weight, see :meth:`Model.tied`.
Tied = Sequence[tuple[str, str]]


class FlopsUnknown(Exception):
    """The FLOPs of a model are unknown; the message, for reports, is the reason."""


@runtime_checkable
class Model(Protocol):
    """A plain ``nn.Module`` with seven methods, independent of ranks, devices and sharding.

    Models are built on the meta device, where a trillion parameters take no memory, and are initialized by
    :func:`ptdbench.models.materialize.materialize`.
    """

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the outputs, or with ``targets`` the mean loss: a scalar in fp32 under every precision."""
        ...

    def layers(self) -> list[nn.Module]:
        """Return the repeated blocks in order: the units of sharding, recomputation and regional compilation."""
        ...

    def parts(self) -> dict[str, nn.Module] | None:
        """Return the model as an ordered chain, keyed by each part's full name in the model.

        ``forward(x, t)`` equals feeding ``x`` through each part in turn, where the last is called as
        ``last(x, t)``. Pipeline stages are runs of consecutive parts. ``None`` if the model is not a chain.

        ``forward`` must call the parts that are submodules, as compilation and FSDP wrap the first and last of them.
        """
        ...

    def roles(self) -> Mapping[str, Role]:
        """Return the roles of modules by full name; modules without one are replicated.

        On any number of ranks that divides the units of the roles, the model computes the same as on one rank. Empty if
        the model cannot be split.
        """
        ...

    def train_flops(self) -> dict[str, float]:
        """Return the FLOPs of forward and backward pass for ONE sample, by part (the keys of :meth:`parts`).

        A multiply-add is 2 FLOPs. Only matrix products and convolutions count; recomputation does not.

        Raises:
            FlopsUnknown: The FLOPs are unknown, with the reason.
        """
        ...

    def tied(self) -> list[tuple[str, str]]:
        """Return pairs of full parameter names in different parts that are one weight; the first gives the value."""
        ...

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill one parameter or buffer in place with its initial value.

        Args:
            name: The full name in the model.
            tensor: The storage, on any device.
            generator: The only source of randomness, on the tensor's device.
        """
        ...


def roles_of(model: Model) -> dict[str, Role]:
    """Return the model's roles by full name; a user's own model may give only the kind of a role.

    Raises:
        ConfigError: A role is invalid, or names a module that the model does not have.
    """
    named: Mapping[str, Any] = model.roles()
    roles = {name: role if isinstance(role, Role) else Role(role) for name, role in named.items()}
    modules, kinds = {name for name, _ in module_of(model).named_modules()}, get_args(Kind)
    problems = []
    for name, role in roles.items():
        if role.kind not in kinds:
            problems.append(Problem(f"roles()[{name!r}]", role.kind, "is not a role", try_these(kinds)))
        elif name not in modules:
            problems.append(Problem(f"roles()[{name!r}]", role.kind, "the model has no module of this name"))
    require(*problems)
    return roles


class Piece(nn.Module):
    """A part of a chain that is not a single submodule: the submodules whose weights it uses.

    Only a stage of such parts runs, see :func:`runner`.
    """

    def __init__(self, members: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.members = dict(members)  #: The submodules by full name; the holder of the piece registers them.
        self.__dict__ |= {"_modules": {}}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the weights of its members."""
        for member in self.members.values():
            yield from member.parameters(recurse)


def members(name: str, part: nn.Module) -> Mapping[str, nn.Module]:
    """Return the submodules of a part by full name; for most parts, only the part itself."""
    return part.members if isinstance(part, Piece) else {name: part}


#: Called with a module that holds the weights of consecutive pieces, the tensors that have arrived from the pieces
#: before, the model's inputs and its targets; returns the tensors for the pieces after.
Runs = Callable[[nn.Module, Sequence[Tensor], Any, Tensor | None], Any]


def runner(model: Model, names: Sequence[str]) -> Runs | None:
    """Return a function that runs consecutive pieces, by a model's optional method of this name.

    ``None``: its parts are called in turn.
    """
    make = getattr(model, "runner", None)
    return None if make is None else make(names)


def masked_flops(model: Model) -> float | None:
    """Return the part of ``train_flops()`` that causal attention masks, as stated by a model's method of this name.

    It is half of the scores and of mixing the values; with a window of W positions, ``W² / 2`` of the ``T · W`` counted
    pairs. 0: no causal attention; ``None``: unknown.
    """
    stated = getattr(model, "masked_flops", None)
    return None if stated is None else stated()


def loss_of_outputs(model: Model) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a model's optional method ``loss(outputs, targets)``, which saves evaluations a second forward pass."""
    loss = getattr(model, "loss", None)
    return loss if callable(loss) else None


def only_loss(model: Model) -> bool:
    """Whether ``forward`` requires targets, and so returns no outputs."""
    return getattr(model, "only_loss", False)


def module_of(model: Model) -> nn.Module:
    """Cast the model to ``nn.Module``: Python has no intersection types."""
    return cast(nn.Module, model)


def wrap_forward(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``module.forward`` with ``wrapper(module.forward)``.

    Parameter names do not change, and hooks (DDP's, FSDP's) stay outside the wrapper.
    """
    module.forward = wrapper(module.forward)  # type: ignore[method-assign]


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a model without its own, as an fp32 scalar.

    Args:
        outputs: Floating point, any shape.
        targets: Floating point and of the same shape: mean squared error. Integer: cross entropy, with the classes in
            the last dimension of ``outputs`` if the other dimensions equal ``targets``' shape, else in the second, as
            in :func:`torch.nn.functional.cross_entropy`. Targets of -100 are ignored: the mean is over the rest of a
            micro-batch, so it depends on the micro-batches.

    Raises:
        ValueError: Floating-point targets differ in shape from the outputs.
    """
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            raise ValueError(f"outputs have shape {tuple(outputs.shape)}, but targets {tuple(targets.shape)}")
        return F.mse_loss(outputs.float(), targets.float())
    if outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return F.cross_entropy(outputs.float(), targets)
