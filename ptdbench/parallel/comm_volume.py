"""Communication volume of a step by formula, exact or unknown, for comparison with the sizes in a trace.

A message has the size of a rank's input to the operation, or of its output if larger. Messages of a single number, such
as the gradient norm, are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptdbench.kernels.choice import Kernels
from ptdbench.models.experts import Router
from ptdbench.models.protocol import Model, module_of
from ptdbench.optim.groups import rules
from ptdbench.parallel import experts, fp8
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.footprint import local_parts, modules_of_ranks
from ptdbench.parallel.options import Options
from ptdbench.parallel.pipeline_stages import by_stage, split_stages
from ptdbench.parallel.precision import DTYPES, Name
from ptdbench.parallel.roles import roles_of
from ptdbench.parallel.tensor import gathers_logits, split_dimensions

#: The operations with formulas.
OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "dispatch", "combine", "broadcast", "send", "recv"
)  # fmt: skip

#: Bytes by formula; ``None``: unknown.
Size = float | None

#: Bytes per element of gradients, losses and softmax normalizers.
_WIDE = 4

#: Numbers per token that ranks reduce for a loss over a split vocabulary, see ``LinearCrossEntropy``.
_OF_LOSS = 3

#: Gathered stages that torch's pipeline schedules keep on a rank: ``_add_unshard_reshard(max_active_stages=3)``.
_KEPT_STAGES = 3

#: Bytes per element of a reduced gradient.
_SENT = {"fp32": _WIDE, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class CommModel:
    """A model of a step's communication: the work and its layout."""

    #: On the meta device; of a model on another device, only the traffic of weights and gradients is predicted.
    model: Model
    example: tuple[Tensor, Tensor]  #: Inputs and targets of one sample on the meta device.
    layout: BatchPlan  #: How the global batch is split over the ranks.
    options: Options  #: The options of ``parallel``.
    precision: Name = "fp32"  #: Dtype of the arithmetic.
    kernels: Kernels = "fused"  #: Whose recipe is used in a narrow format.
    recomputes: bool = False  #: Whether the backward pass recomputes some of the forward pass.
    gathers: int = 0  #: Bytes per element of each sharded matrix that the optimizer gathers; 0: none.
    forced: bool = False  #: Whether experts are chosen round-robin, whatever the model's routers do.

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP gathers the weights."""
        return self.options.shards(self.layout.dims)


def comm_bytes(work: CommModel) -> dict[str, Size]:
    """Return the bytes of each of :data:`OPERATIONS` in a step, averaged over ranks."""
    model, dims, options = work.model, work.layout.dims, work.options
    is_replicated = options.replicates(dims)
    terms = []
    if is_replicated:
        terms.append(_of_copies(work))
    elif not all(weight.requires_grad for weight in module_of(model).parameters()):
        terms.append(_unknown(*OPERATIONS))
    if work.is_sharded:
        terms.append(_of_shards(work))
    routers = [part for part in module_of(model).modules() if isinstance(part, Router)]
    terms.append(_of_routers(work, routers))
    if work.gathers and dims.tensor > 1:
        terms.append(_unknown("all_gather"))
    if options.sync_batchnorm and (is_replicated or work.is_sharded) and _batch_norms(model):
        terms.append(_unknown("all_reduce", "all_gather"))
    if max(dims.pipeline, dims.tensor, dims.context) > 1:
        is_unknown = options.autocasts(dims, work.kernels, DTYPES[work.precision])
        terms += [_of_autocast(dims)] if is_unknown else _of_activations(work)
    total = {name: sum(term.get(name, 0.0) for term in terms) / dims.pipeline for name in OPERATIONS}
    volumes: dict[str, Size] = {name: None if math.isnan(size) else size for name, size in total.items()}
    return volumes | (_of_experts(work, routers) if dims.expert > 1 and work.example[1].dim() > 1 else {})


def _unknown(*operations: str) -> dict[str, float]:
    """Return sizes that make any sums with them unknown."""
    return dict.fromkeys(operations, math.nan)


def _of_copies(work: CommModel) -> dict[str, float]:
    """Return the traffic of DDP: each gradient is averaged once per step (Li et al. 2020, arXiv 2006.15704).

    Under ZeRO-1 each replica broadcasts the weights that it updates (Rajbhandari et al. 2020, section 5).
    """
    weights = [weight for stage in _stages(work) for weight in stage.parameters() if weight.requires_grad]
    return {
        "all_reduce": _SENT[work.options.sent] * sum(weight.numel() for weight in weights),
        "broadcast": sum(weight.nbytes for weight in weights) if work.options.optimizer == "zero1" else 0,
    }


def _of_shards(work: CommModel) -> dict[str, float]:
    """Return the traffic of FSDP.

    A layer is gathered for its forward and again for its backward passes; the last layer, unless ``kernels=torch``, and
    the weights outside layers once for both. Gradients are reduce-scattered once per step, or if requested once per
    micro-batch, and the shards averaged between replicas once per step (Zhao et al. 2023, arXiv 2304.11277); under a
    pipeline both happen once per pass of its schedule. Shards are padded to equal sizes. How often pipeline stages
    gather layers that they free depends on the order of micro-batches, and is unknown; so is how often they gather all
    layers, if a rank has more than :data:`_KEPT_STAGES`. For weights gathered in fp8, ranks first agree on the scales.
    """
    options, dims, passes = work.options, work.layout.dims, work.layout.accumulation
    parts, of = local_parts(work.model, options, dims), rules(module_of(work.model))
    norms = {weight for module in _batch_norms(work.model) for weight in module.parameters()}
    layers = work.model.layers()
    is_staged = dims.pipeline > 1
    once: float = passes if options.frees_between_microbatches(dims) or is_staged else 1
    if is_staged and options.stages_on_rank > _KEPT_STAGES:
        once = math.nan
    again = 0 if options.frees_after_forward(dims) is False else math.nan if is_staged else passes
    item, sent = DTYPES[work.precision].itemsize, _SENT[options.sent] * (passes if is_staged else 1)
    sums = passes if options.reduce_scatter_each_microbatch else 1
    of_fp8 = {layer.weight for layer in fp8.converted(layers, work.precision, sharded=True)}
    of_fp8 = of_fp8 if fp8.is_gathered(work.precision, sharded=True) else set()
    gathered = reduced = averaged = agreed = 0.0
    of_experts = experts.parts(work.model, dims)
    for stage in _stages(work):
        inside = set(stage.modules())
        freed = [layer for layer in layers if layer in inside][: -1 if work.kernels == "fused" else None]
        of_freed = {weight for layer in freed for weight in layer.parameters()}
        for weight in stage.parameters():
            numbers = parts[weight].numel()
            ranks = dims.regroup_copies("expert") if weight in of_experts else dims.shards
            averaged += numbers * sent
            if ranks == 1:
                continue
            whole = ranks * numbers
            times = once + again if weight in of_freed else once
            gathered += whole * (_WIDE if weight in norms else 1 if weight in of_fp8 else item) * times
            agreed += _WIDE * (weight in of_fp8)
            gathered += whole * work.gathers * (of[weight] == "matrices")
            reduced += whole * sent * sums
    return {
        "all_gather": gathered,
        "reduce_scatter": reduced,
        "all_reduce": (averaged if dims.copies > 1 else 0.0) + agreed,
    }


def _stages(work: CommModel) -> Iterator[nn.Module]:
    """Return the stages of all ranks of a pipeline, or the model."""
    return chain.from_iterable(modules_of_ranks(work.model, work.options.stage_ranks(work.layout.dims)))


def _of_routers(work: CommModel, routers: Sequence[Router]) -> dict[str, float]:
    """Return the traffic of load balancing: ranks sum how often each expert was chosen."""
    dims = work.layout.dims
    numbers = sum(router.experts for router in routers if router.balances)
    groups = (dims.ways("samples", "positions"), dims.tensor)
    return {"all_reduce": float(_WIDE * numbers * sum(size > 1 for size in groups))}


def _of_experts(work: CommModel, routers: Sequence[Router]) -> dict[str, Size]:
    """Return the traffic of experts: tokens to their experts and back, their gradients, and counts.

    Unknown unless experts are chosen round-robin by our routers, equally often: otherwise the data decide; and if the
    backward pass recomputes: the dispatch then runs twice, and the combine, at the end of a layer, possibly not.
    """
    if work.recomputes or len(routers) < len(experts.modules(work.model)):
        return {"dispatch": None, "combine": None}
    layout, dims = work.layout, work.layout.dims
    tokens = work.example[1].numel() // dims.context // dims.tensor  # of a sample, on a rank
    item, passes = DTYPES[work.precision].itemsize, layout.accumulation * layout.microbatches
    sent = counts = 0.0
    for router in routers:
        # Round-robin, all experts get equally many if rounds are whole; a ring splits its positions into two pieces.
        pieces = 2 if dims.context > 1 and work.options.context_method == "ring" else 1
        in_turn = (work.forced or router.forced) and tokens * router.active % (pieces * router.experts) == 0
        if not in_turn or (router.capacity is not None and router.capacity < 1):
            return {"dispatch": None, "combine": None}
        sent += tokens * router.active * layout.replica_batch * router.weight.shape[1] * item
        counts += 8 * router.experts * passes
    both = 2 * sent / dims.pipeline
    return {"dispatch": both + counts / dims.pipeline, "combine": both}


def _of_autocast(dims: Dims) -> dict[str, float]:
    """Return the traffic of activations whose dtypes torch chooses: unknown, except for the loss."""
    if dims.tensor > 1:
        return _unknown(*OPERATIONS)
    of_stages = _unknown("send", "recv") if dims.pipeline > 1 else {}
    return of_stages | (_unknown("all_to_all", "all_gather") | {"all_reduce": _WIDE} if dims.context > 1 else {})


def _of_activations(work: CommModel) -> Iterator[dict[str, float]]:
    """Yield the traffic of activations; unknown if their sizes cannot be determined."""
    dims, module = work.layout.dims, module_of(work.model)
    try:
        if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise NotImplementedError  # elsewhere it would compute, draw random numbers and change its buffers
        inputs, outputs = _sizes(work)
    except Exception:  # a model not made for the meta device may raise anything
        yield _unknown(*OPERATIONS)
        return
    if dims.pipeline > 1:
        yield _between_stages(work, outputs)
    if dims.context > 1:
        yield _of_attention(work, inputs, outputs)
        yield {"all_reduce": _WIDE / dims.tensor}  # the loss: each rank has the mean over its own positions
    if dims.tensor > 1:
        yield from _of_products(work, outputs)


def _between_stages(work: CommModel, outputs: Mapping[str, int]) -> dict[str, float]:
    """Return the traffic between stages: activations forward, their gradients backward (Huang et al. 2019).

    The gradients of a weight that several stages share are exchanged once per step, between each pair of ranks.
    """
    dims = work.layout.dims
    split = split_stages(work.model, work.options.stage_ranks(dims))
    neighbors = zip(split.stages, pairwise(split.ranks), strict=False)
    sent = [names[-1] for names, (here, there) in neighbors if here != there]
    size = sum(outputs[name] for name in sent) * _bytes_per_sample(work) / (dims.tensor if work.options.sequence else 1)
    dimensions = split_dimensions(work.model) if dims.tensor > 1 else {}
    shards = dims.shards if work.is_sharded else 1
    for stages in by_stage(work.model.tied(), split):
        ranks = len({split.ranks[stage] for stage in stages})
        weight = module_of(work.model).get_parameter(next(iter(stages.values()))[0])
        if weight.requires_grad:
            size += ranks * (ranks - 1) / 2 * weight.nbytes / shards / (dims.tensor if weight in dimensions else 1)
    return {"send": 2 * size, "recv": 2 * size}


def _of_attention(work: CommModel, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> dict[str, float]:
    """Return the traffic of context parallelism: all-to-alls of queries, keys, values, their mixture, and gradients.

    See Jacobs et al. 2023. Ring attention gathers keys and values of all positions in each pass, and passes their fp32
    gradients through each rank.
    """
    names = [name for name, role in roles_of(work.model).items() if role.kind == "attention"]
    if work.options.context_method == "ring":
        numbers = sum(inputs[name] - outputs[name] for name in names)  # a mixture is as large as the queries
        passing = work.layout.dims.context * numbers * _bytes_per_sample(work) / work.layout.dims.tensor
        wider = _WIDE / DTYPES[work.precision].itemsize
        return {"all_gather": math.nan if work.recomputes else 2 * passing, "all_to_all": wider * passing}
    if work.recomputes:
        return _unknown("all_to_all")
    numbers = sum(inputs[name] + outputs[name] for name in names)
    return {"all_to_all": 2 * numbers * _bytes_per_sample(work) / work.layout.dims.tensor}


def _of_products(work: CommModel, outputs: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Yield the traffic of tensor parallelism.

    Outputs of row-wise layers are summed in the forward pass, input gradients of column-wise layers in the backward
    pass (Shoeybi et al. 2019, section 3). With sequence parallelism sums are reduce-scattered, and gathered in the
    other pass (Korthikanti et al. 2022, section 4.2.2).
    """
    module, sequence = module_of(work.model), work.options.sequence
    narrow_sums = sequence and work.is_sharded and DTYPES[work.precision] != torch.float32
    if work.recomputes or narrow_sums:
        yield _unknown("all_reduce", "all_gather", "reduce_scatter")
    summands: set[nn.Parameter] = set()
    for name, role in roles_of(work.model).items():
        size = outputs[name] * _bytes_per_sample(work)
        if role.kind in ("sequence", "rowwise", "rowwise_split_input"):
            yield {"reduce_scatter": size, "all_gather": size} if sequence else {"all_reduce": size}
        elif role.kind == "split_sequence" and not sequence:
            yield _unknown("all_gather", "all_reduce")
        elif role.kind == "scatter" and sequence:
            yield {"all_gather": size}
        elif role.kind == "vocabulary" and isinstance(module.get_submodule(name), nn.Embedding):
            yield {"all_reduce": size}
        elif role.kind in ("vocabulary", "colwise_gather_output") and size and gathers_logits(work.model):
            yield _unknown("all_gather", "reduce_scatter", "all_reduce")
        elif role.kind == "loss":
            tokens = work.example[1].numel() * work.layout.replica_batch / work.layout.dims.context
            yield {"all_reduce": _OF_LOSS * _WIDE * tokens}
        # Each rank has only its summand of the gradients of these weights.
        if role.kind in ("replicated", "split_sequence") or (role.kind == "sequence" and sequence):
            summands |= set(module.get_submodule(name).parameters())
    summands -= experts.parts(work.model, work.layout.dims).keys()
    # FSDP sums them when it reduces gradients: under a pipeline in each pass of its schedule.
    reduces_each = work.layout.dims.pipeline > 1 or work.options.reduce_scatter_each_microbatch
    times = work.layout.accumulation if work.is_sharded and reduces_each else 1
    yield {"all_reduce": float(times * sum(weight.nbytes for weight in summands))}


def _bytes_per_sample(work: CommModel) -> float:
    """Return a rank's bytes of an activation in a step, per element of the activation in one sample."""
    layout = work.layout
    return DTYPES[work.precision].itemsize * layout.replica_batch / layout.dims.context


def _sizes(work: CommModel) -> tuple[Counter[str], Counter[str]]:
    """Count the input and output elements of each part and each module with a role, by name, for one sample."""
    module, parts = module_of(work.model), work.model.parts() or {"": module_of(work.model)}
    inputs, outputs = Counter[str](), Counter[str]()

    def note(name: str, _module: nn.Module, arguments: tuple[Any, ...], outcome: Tensor) -> None:
        inputs[name] += sum(argument.numel() for argument in arguments if isinstance(argument, Tensor))
        outputs[name] += outcome.numel()

    hooks = [module.get_submodule(name).register_forward_hook(partial(note, name)) for name in roles_of(work.model)]
    try:
        with torch.no_grad():
            value, targets = work.example
            *before, last = parts
            for name in before:
                value = parts[name](value)
                outputs[name] = value.numel()
            parts[last](value, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, outputs


def _batch_norms(model: Model) -> list[nn.Module]:
    return [module for module in module_of(model).modules() if isinstance(module, _BatchNorm)]
