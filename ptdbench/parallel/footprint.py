"""Memory footprint of training state on each rank, exact to the byte, without allocating any of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ptdbench.kernels import Kernels
from ptdbench.kernels.copies import copied_weights
from ptdbench.models.protocol import Model, members, module_of
from ptdbench.optim.groups import Rule, rules
from ptdbench.parallel import experts
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.engine import MakeOptimizer
from ptdbench.parallel.options import Options
from ptdbench.parallel.pipeline_stages import split_stages
from ptdbench.parallel.precision import DTYPES, Name
from ptdbench.parallel.replicas import assign_owners
from ptdbench.parallel.tensor import split_dimensions
from ptdbench.problems import ConfigError, Problem, first_line


@dataclass(frozen=True)
class StateBytes:
    """Bytes of training state on one rank; activations, gathered weights and communication buffers come on top."""

    weights: int  #: The rank's parameters and buffers, and the narrow copies that it computes with.
    gradients: int  #: Gradients of its trained parameters.
    optimizer: int  #: Optimizer state after the first step.

    @property
    def total(self) -> int:
        """Sum of all training state."""
        return self.weights + self.gradients + self.optimizer


def footprints(
    model: Model,
    make: MakeOptimizer,
    options: Options = Options(),  # noqa: B008, it is frozen
    dims: Dims = Dims(),  # noqa: B008
    *,
    precision: Name = "fp32",
    kernels: Kernels = "fused",
    pinned: bool = False,
) -> list[StateBytes]:
    """Return the footprint at each position in a pipeline, on the rank there with the largest shards or state.

    Args:
        model: On the meta device or with its weights.
        make: Creates the optimizer.
        options: The options of the layout.
        dims: Its degrees.
        precision: Dtype of the arithmetic.
        kernels: Whose recipe is used in a narrow format: torch's keeps no copies of weights between operations.
        pinned: Whether weights and gradients are in pinned host memory, where torch gives each a power of two.
    """
    narrow, is_zero1 = DTYPES[precision], options.replicates(dims) and options.optimizer == "zero1"
    owners = dims.ways("samples", "positions") if is_zero1 else 1
    copied = None if options.shards(dims) or narrow == torch.float32 or kernels == "torch" else narrow
    named = {parameter: name for name, parameter in module_of(model).named_parameters()}
    rule_of, parts = rules(module_of(model)), local_parts(model, options, dims)
    by_shape = dict[tuple[Rule, torch.Size, torch.dtype], int]()

    def state_bytes(parameter: nn.Parameter) -> int:
        local = parts[parameter]
        key = rule_of[parameter], local.shape, local.dtype
        if key not in by_shape:
            by_shape[key] = _state_bytes(named[parameter], local, make)
        return by_shape[key]

    def of_rank(stages: Sequence[nn.Module]) -> StateBytes:
        # A weight shared within a stage counts once; a weight shared between stages has a copy in each.
        trained = [[weight for weight in module.parameters() if weight.requires_grad] for module in stages]
        state_of = [0] * owners
        for weights in trained:  # ZeRO-1 shards each stage separately
            owner_of = assign_owners([parts[weight].numel() for weight in weights], owners)
            for owner, weight in zip(owner_of, weights, strict=True):
                state_of[owner] += state_bytes(weight)
        local = [parts[weight] for module in stages for weight in module.parameters()]
        if copied:
            local += [parts[weight].to(copied) for module in stages for weight in copied_weights(module)]
        return StateBytes(
            weights=_bytes(local, pinned) + sum(_bytes(module.buffers()) for module in stages),
            gradients=_bytes((parts[weight] for weights in trained for weight in weights), pinned),
            optimizer=max(state_of),
        )

    return [of_rank(stages) for stages in modules_of_ranks(model, options.stage_ranks(dims))]


def modules_of_ranks(model: Model, ranks: Sequence[int]) -> list[list[nn.Module]]:
    """Return the stages of each rank of a pipeline as modules; ``ranks``: the rank of each stage."""
    if len(ranks) == 1:
        return [[module_of(model)]]
    parts, split = model.parts() or {}, split_stages(model, ranks)
    stages = [
        nn.ModuleList(module for name in names for module in members(name, parts[name]).values())
        for names in split.stages
    ]
    return [[stages[number] for number in split.stages_of(rank)] for rank in range(max(ranks) + 1)]


def local_parts(model: Model, options: Options, dims: Dims) -> dict[nn.Parameter, Tensor]:
    """Return a rank's part of each weight of a model, on the meta device; ``fully_shard`` pads the last shard."""
    shards = dims.shards if options.shards(dims) else 1
    dimensions = split_dimensions(model) if dims.tensor > 1 else {}
    parts = {}
    for weight in module_of(model).parameters():
        shape = list(weight.shape)
        if weight in dimensions:
            shape[dimensions[weight]] //= dims.tensor
        if shards > 1:
            shape = [-(-shape[0] // shards), *shape[1:]] if shape else [1]
        parts[weight] = torch.empty(shape, dtype=weight.dtype, device="meta")
    return parts | experts.parts(model, dims)


def _state_bytes(name: str, like: Tensor, make: MakeOptimizer) -> int:
    """Return the bytes of a weight's optimizer state; raise ConfigError if the optimizer needs values or a closure."""
    with FakeTensorMode():  # not the meta device, which fused optimizers refuse
        weight = nn.Parameter(torch.empty(like.shape, dtype=like.dtype))
        weight.grad = torch.empty_like(weight)
        optimizer = make([(name, weight)])
        try:
            optimizer.step()
        except Exception as error:  # a user's optimizer may raise anything
            reason = first_line(error)
            rule = f"its memory cannot be predicted, as its step fails on tensors without values: {reason}"
            remedy = "memory_reserve=null skips the memory check"
            raise ConfigError([Problem("optimizer", type(optimizer).__name__, rule, remedy)]) from None
        return _bytes(value for value in optimizer.state[weight].values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor], pinned: bool = False) -> int:
    sizes = (tensor.nbytes for tensor in tensors)
    return sum(1 << (size - 1).bit_length() if pinned else size for size in sizes)
