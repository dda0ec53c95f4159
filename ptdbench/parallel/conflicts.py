"""Conflicts of options, with each other and with a model: a table of conditions, options, rules and remedies."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptdbench.models.protocol import Model, Role, members, module_of, roles_of
from ptdbench.parallel import experts, tensor
from ptdbench.parallel.activations import Selective
from ptdbench.parallel.dims import BatchPlan, Dims, divisors
from ptdbench.parallel.options import Options
from ptdbench.parallel.pipeline_schedules import SCHEDULES, SPLITS_SINCE, rounds
from ptdbench.parallel.pipeline_stages import split_stages
from ptdbench.parallel.precision import FP8_RECIPES, gathers_fp8
from ptdbench.problems import Problem, nearest, try_these

#: Whether the option is ruled out, the option, the rule, and a remedy.
Row = tuple[object, str, str, str]

_NO_EFFECT = "has no effect under these degrees of parallelism"
_1F1B = "parallel.schedule=interleaved1f1b"
_UNDIVIDED = "try 1, or parallel=ddp,fsdp"


def of_values(options: Options) -> list[Row]:
    """Return the conflicts of values that are invalid whatever the degrees."""
    schedule, stages = SCHEDULES.get(options.schedule), options.stages_per_rank
    allowed = schedule.stages if schedule and options.pipeline != 1 else stages
    return [
        (schedule is None and options.pipeline != 1, "schedule", f"must be {', '.join(SCHEDULES)}",
         try_these(nearest(options.schedule, SCHEDULES))),
        (allowed != "several" and stages not in ("auto", allowed), "stages_per_rank",
         f"must be {allowed} under {options.schedule}", f"try auto, or {_1F1B}"),
        (allowed == "several" and stages != "auto" and stages < 2, "stages_per_rank",
         f"must be a whole number of at least 2 under {options.schedule}", "try auto, or parallel.schedule=1f1b"),
        (schedule and options.pipeline != 1 and not schedule.is_supported, "schedule",
         f"needs torch {SPLITS_SINCE} or newer (installed: {torch.__version__})", "try interleaved1f1b, looped_bfs"),
        (options.bucket_mb != "auto" and options.bucket_mb <= 0, "bucket_mb", "must be greater than 0 (MiB)",
         "try auto, 25"),
    ]  # fmt: skip


def of_degrees(options: Options) -> list[Row]:
    """Return options that have no effect, or not the requested one, under the requested degrees."""
    is_one = {name: degree == 1 for name, degree in options.degrees().items()}
    is_set = {field.name: getattr(options, field.name) != field.default for field in fields(options)}
    # A degree that is derived counts as above 1, as it is on several ranks.
    dims = Dims(**{name: degree if isinstance(degree, int) else 2 for name, degree in options.degrees().items()})
    # DDP also averages gradients over ranks that share a sequence, and FSDP also shards weights over them.
    ignored = is_one | {"replicate": not options.replicates(dims), "shard": not options.gathers_weights(dims)}
    reshards_to_group = not isinstance(options.reshard_after_forward, bool)
    return [
        *(
            (ignored[degree] and is_set[option], option, _NO_EFFECT, f"it belongs to {row.preset}")
            for degree, row in options.rows().items()
            for option in row.options
        ),
        (dims.ways("samples", "positions") == 1 and is_set["gradients"],
         "gradients", _NO_EFFECT, "it belongs to parallel=ddp,pdp,fsdp,hsdp"),
        (not is_one["pipeline"] and is_set["reduce_scatter_each_microbatch"], "reduce_scatter_each_microbatch",
         "has no effect under a pipeline, whose schedule reduces the gradients of a stage after its last micro-batch",
         "try false"),
        (reshards_to_group and not (is_one["pipeline"] and is_one["tensor"] and is_one["context"]),
         "reshard_after_forward",
         "a group size is not supported with pipeline, tensor or context parallelism", "try true, false"),
        (is_one["replicate"] and is_one["shard"] and is_set["sync_batchnorm"],
         "sync_batchnorm", _NO_EFFECT, "it belongs to parallel=ddp,pdp,fsdp,hsdp"),
    ]  # fmt: skip


def of_layout(options: Options, plan: BatchPlan, micro_batch: object = "auto") -> Iterator[Row]:
    """Yield the conflicts of a run's degrees and micro-batches, of the requested ``micro_batch``, with its options."""
    dims, groups = plan.dims, divisors(plan.dims.shard)[1:-1]
    frees = options.reshard_after_forward
    if options.applies("pipeline", dims):
        schedule, per_rank, count = options.pipeline_schedule, options.stages_on_rank, plan.microbatches
        fewest, equal = schedule.fewest(dims.pipeline, per_rank), rounds(count, dims.pipeline)
        other = "auto" if options.microbatches != "auto" else f"a smaller train.micro_batch than {micro_batch}"
        if options.microbatches == micro_batch == "auto":
            other = f"a train.global_batch of at least {dims.batch * fewest}"
        remedy = f"try {other}, or parallel.schedule=gpipe"
        yield (count < fewest, "microbatches",
               f"must be at least the number of stages, {fewest}, under {options.schedule}", remedy)  # fmt: skip
        yield (count >= fewest and not schedule.accepts(count, dims.pipeline, per_rank), "microbatches",
               f"must be a multiple of {equal} under {options.schedule}, which runs them in {equal} equal rounds",
               remedy)  # fmt: skip
    yield from [
        (not isinstance(frees, bool) and frees not in groups, "reshard_after_forward",
         f"a group size must divide shard({dims.shard}), and lie between 1 and {dims.shard}",
         try_these(["true", "false", *groups])),
        (options.frees_after_forward(dims) and options.splits_backward(dims), "reshard_after_forward",
         f"gives wrong gradients under {options.schedule}, which defers weight gradients past later forward passes",
         f"try false, or {_1F1B}"),
    ]  # fmt: skip


def of_option(options: Options, plan: BatchPlan | None, name: str, value: object) -> list[Row]:
    """Return the conflicts with an option outside ``parallel``, such as ``precision``; ``plan``: if it is known."""
    dims = plan.dims if plan else Dims()
    is_ring = options.applies("context", dims) and options.context_method == "ring"
    splits = options.splits_backward(dims)
    is_gathered_fp8 = gathers_fp8(value, sharded=options.shards(dims))
    rows: dict[str, list[Row]] = {
        "compile": [
            (value == "whole" and is_ring, "compile", "needs a single graph, but ring attention is not compiled",
             "try layers, or parallel.context_method=ulysses"),
            (value == "whole" and options.shards(dims), "compile",
             "needs a single graph, but sharded weights are gathered between layers",
             "try layers, or parallel=ddp"),
            (value and splits, "compile", f"makes the backward pass one graph, but {options.schedule} splits it",
             f"try false, or {_1F1B}"),
        ],
        "activations": [
            (isinstance(value, Selective) and dims.expert > 1, "activations",
             "relies on the order of a layer's operations, which gathering its experts changes",
             "try recompute, keep"),
            (isinstance(value, Selective) and splits, "activations",
             f"keeps results for one backward pass, but {options.schedule} runs two",
             f"try recompute, keep, or {_1F1B}"),
        ],
        "offload": [
            (value == "optimizer_and_weights" and not (options.applies("shard", dims) or options.gathers_weights(dims)),
             "offload", "needs sharded weights, but these degrees of parallelism shard none",
             f"try {options.rows()['shard'].preset}"),
        ],
        "optimizer": [
            (_unsharded(value) and (options.shards(dims) or dims.tensor > 1), "optimizer._target_",
             "does not support sharded weights in torch", "try adamw, or parallel=ddp"),
        ],
        "precision": [
            (value in FP8_RECIPES and options.applies("tensor", dims), "precision",
             "does not support tensor parallelism: its layers do not accept DTensors", "try bf16"),
            (is_gathered_fp8 and not isinstance(options.reshard_after_forward, bool), "parallel.reshard_after_forward",
             "a group size is not supported for weights gathered in fp8", "try true, false, or precision=fp8"),
        ],
    }  # fmt: skip
    return rows[name]


def of_model(options: Options, model: Model, dims: Dims) -> Iterator[Row]:
    """Yield the requirements that a model does not meet, of the first degree of a run that it does not suit."""
    for applies, rows in (
        (options.applies("pipeline", dims), _of_stages(options, model, dims)),
        (options.applies("tensor", dims), _of_products(options, model, dims)),
        (options.applies("context", dims), _of_positions(options, model, dims)),
        (dims.expert > 1, _of_experts(model, dims)),
        (options.sync_batchnorm, _of_norms(model)),
        (options.shards(dims), _of_shards(model)),
    ):
        if applies and (refused := [row for row in rows if row[0]]):
            yield from refused
            return


def divides(options: Options, model: Model, dims: Dims) -> bool:
    """Whether the ranks of tensor and context parallelism divide what they share of a model, such as its heads."""
    products = _of_products(options, model, dims) if dims.tensor > 1 else ()
    positions = _of_positions(options, model, dims) if dims.context > 1 else ()
    return not any(row[0] for row in (*products, *positions))


def of_sample(options: Options, inputs: Any, targets: Tensor, dims: Dims) -> list[Row]:
    """Return the reasons why ranks cannot share the positions of a sample, ``[batch, length]``."""
    if not options.applies("context", dims):
        return []
    if not isinstance(inputs, Tensor):
        return [(True, "context", "splits the positions of one tensor, but the inputs are several", _UNDIVIDED)]
    if inputs.dim() < 2:
        return []
    return [
        _undivided_positions(options, dims, [Role("positions", inputs.shape[1], "positions")], "a sample"),
        (targets.shape[:2] != inputs.shape[:2], "context",
         f"splits inputs and targets by position, but their shapes are {list(inputs.shape)} and {list(targets.shape)}",
         _UNDIVIDED),
    ]  # fmt: skip


def _of_stages(options: Options, model: Model, dims: Dims) -> Iterator[Row]:
    parts, per_rank = model.parts(), options.stages_on_rank
    if parts is None:
        reason = getattr(model, "unsplit", None) or "it has no parts()"
        others = ["parallel=ddp"] if any(row[0] for row in _of_shards(model)) else ["parallel=ddp", "parallel=fsdp"]
        rule = f"the model cannot be split into stages: {reason}"
        yield True, "pipeline", rule, f"define parts(), or {try_these(others)}"
        return
    stages, layers = dims.pipeline * per_rank, min(len(parts), len(model.layers() or parts))
    if stages > layers:
        product = f"pipeline({dims.pipeline}) x stages_per_rank({per_rank}) = {stages} stages " if per_rank > 1 else ""
        fits = [size for size in divisors(dims.world_size) if size > 1 and size * per_rank <= layers][-3:]
        single = per_rank > 1 and dims.pipeline <= layers
        others = ["or parallel.schedule=1f1b" if fits else "parallel.schedule=1f1b"] if single else []
        remedy = try_these([*fits, *others]) or "try another cluster.ranks_per_node, or parallel=ddp"
        yield True, "pipeline", f"{product}must not exceed the model's {layers} layers", remedy
        return
    for number, names in enumerate(split_stages(model, range(stages)).stages):
        is_trained = any(weight.requires_grad for name in names for weight in parts[name].parameters())
        yield (not is_trained, "pipeline", f"stage {number} has no trainable weights",
               "try parallel=fsdp, or fewer stages")  # fmt: skip
    within = tuple(f"{member}." for name, part in parts.items() for member in members(name, part))
    for first, second in model.tied():
        yield (not (first.startswith(within) and second.startswith(within)), "pipeline",
               f"{first} and {second} are the same weight, and one of the two names is in no part",
               "register it under one name, or try parallel=ddp")  # fmt: skip


def _of_products(options: Options, model: Model, dims: Dims) -> Iterator[Row]:
    styles = tensor.styles(options.sequence)
    roles = {name: role for name, role in roles_of(model).items() if role.kind in styles}
    kinds = {role.kind for role in roles.values()}
    is_split = not kinds.isdisjoint(tensor.DIMENSIONS)
    reason = getattr(model, "undivided", None) or "needs a model whose roles() name layers to split"
    yield not is_split, "tensor", reason, _UNDIVIDED
    yield (is_split and options.sequence and "scatter" not in kinds, "sequence",
           "needs a model whose roles() name a module to scatter: the start of its residual stream",
           "try false")  # fmt: skip
    positions, others = list[Role](), list[Role]()
    for name, role in roles.items():
        if role.kind in ("scatter", "split_sequence"):
            positions.append(role)
        elif role.units or role.kind not in tensor.DIMENSIONS:
            others.append(role)
        else:  # the features that are split
            layer: Any = module_of(model).get_submodule(name)
            others.append(replace(role, units=layer.weight.shape[tensor.DIMENSIONS[role.kind]]))
    yield _undivided("tensor", dims.tensor, positions, dims.context, "which context parallelism splits too")
    yield _undivided("tensor", dims.tensor, others)


def _of_positions(options: Options, model: Model, dims: Dims) -> Iterator[Row]:
    roles = roles_of(model).values()
    attention, positions = ([role for role in roles if role.kind == kind] for kind in ("attention", "positions"))
    yield (not (attention and positions), "context",
           "needs a model whose roles() name its attention and the module given its positions",
           _UNDIVIDED)  # fmt: skip
    yield _undivided_positions(options, dims, positions)
    if options.context_method == "ulysses":
        yield _undivided("context", dims.context, attention, dims.tensor, "which tensor parallelism splits too")
    yield (options.context_method == "ring" and not all(role.is_causal for role in attention), "context_method",
           "supports only causal attention, but the model's roles() do not mark it is_causal",
           "try ulysses")  # fmt: skip


def _of_experts(model: Model, dims: Dims) -> Iterator[Row]:
    roles = [role for role in roles_of(model).values() if role.kind == "experts"]
    yield not roles, "expert", "needs a model with experts", "try 1, parallel=fsdp, or model=moe_tiny"
    yield _undivided("expert", dims.expert, roles)
    copies, shared = dims.regroup_copies("expert"), experts.units(model)
    whole = dims.expert * copies
    for rows in {weight.shape[experts.SHARDED] for part in experts.modules(model) for weight in part.parameters()}:
        fits = [size for size in divisors(whole) if shared % size == rows % (whole // size) == 0]
        yield (rows % copies, "expert",
               f"leaves {copies} replicas of each expert, which must divide the {rows} rows of its matrices",
               try_these([*fits, "another number of ranks", "or parallel=fsdp"]))  # fmt: skip


def _of_norms(model: Model) -> Iterator[Row]:
    has_norms = any(isinstance(module, _BatchNorm) for module in module_of(model).modules())
    yield not has_norms, "sync_batchnorm", "has no effect on a model without torch's batch norms", "try false"


def _of_shards(model: Model) -> Iterator[Row]:
    layers = set(model.layers())  # a module without layers counts as one layer
    units = [f"{name}." for name, part in module_of(model).named_modules() if part in layers]
    first: dict[nn.Parameter, tuple[str, str | None]] = {}
    for name, weight in module_of(model).named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(unit)), None)
        other, other_unit = first.setdefault(weight, (name, unit))
        for is_refused, rule in (
            (unit != other_unit, f"{other} and {name} are the same weight, which fully_shard needs in one layer"),
            (weight.is_complex(), f"{name} is complex, but fully_shard supports only real dtypes"),
            (not weight.dim(), f"{name} is a scalar, which fully_shard cannot shard: give it shape (1,)"),
            (not weight.numel(), f"{name} is empty, which fully_shard does not support"),
            (not weight.is_contiguous(), f"{name} is not contiguous, as fully_shard requires: "
             "nn.Parameter(weight.contiguous())"),
        ):  # fmt: skip
            if is_refused:
                yield True, "shard", rule, "try parallel=ddp"
                return


def _undivided_positions(options: Options, dims: Dims, positions: Sequence[Role], whole: str = "the model") -> Row:
    pieces = 2 if options.context_method == "ring" else 1
    return _undivided("context", dims.context, positions, pieces, "two pieces per rank", whole)


def _undivided(
    option: str, ranks: int, roles: Sequence[Role], others: int = 1, reason: str = "", whole: str = "the model"
) -> Row:
    """Return whether ``ranks`` times ``others`` do not divide the units of any role of ``whole``.

    ``others``: another degree that splits the same units, or the pieces per rank; ``reason``: which, to follow a comma.
    """
    shared = [role for role in roles if role.units]
    wrong = next((role for role in shared if role.units % (ranks * others)), None)
    if wrong is None:
        return False, option, "", ""
    smaller = [size for size in divisors(wrong.units) if 1 < size < ranks]
    fits = [size for size in smaller if all(role.units % (size * others) == 0 for role in shared)]
    rule = f"must divide the {wrong.units} {wrong.unit} of {whole}"
    return True, option, f"times {others} {rule}, {reason}" if others > 1 else rule, try_these(fits or [1])


def of_gloo(options: Options, dims: Dims, model: Model, *, gathers: bool) -> list[Row]:
    """Return what gloo supports only for host tensors; ``gathers``: whether the optimizer gathers sharded updates.

    Most collectives of GPU tensors, all-to-all included, are staged through host memory. But in send, receive and
    functional all-gathers, such as a DTensor's ``redistribute``, gloo takes a GPU's addresses for the host's: the rank
    fails, or dies of SIGSEGV.
    """
    divides, shards = dims.tensor > 1, options.gathers_weights(dims)
    kinds = {role.kind for role in roles_of(model).values()}
    gathers_logits = "colwise_gather_output" in kinds or ("vocabulary" in kinds and "loss" not in kinds)
    users = {
        "ring attention": dims.context > 1 and options.context_method == "ring",
        "sequence parallelism": divides and options.sequence,
        "a mixture of experts under tensor parallelism": divides and "split_sequence" in kinds,
        "tensor-parallel logits": divides and gathers_logits,
        "the optimizer's updates of sharded matrices": gathers and (divides or shards),
    }
    remedy, rule = "try nccl, or device=cpu", "has no functional all-gather of GPU tensors, needed by"
    return [
        (dims.pipeline > 1, "backend", "cannot send GPU tensors, as pipeline stages do", remedy),
        *((is_user, "backend", f"{rule} {user}", remedy) for user, is_user in users.items()),
    ]


def of_torch(options: Options, dims: Dims, device_type: str, compiles: object) -> list[Row]:
    """Return where torch's own recipes, ``kernels=torch``, do not work."""
    return [
        (options.sync_batchnorm and device_type == "cpu", "parallel.sync_batchnorm",
         "with kernels=torch is nn.SyncBatchNorm, which takes tensors of GPUs only", "try false, or kernels=fused"),
        (compiles == "whole" and dims.tensor > 1, "compile",
         "is one graph, and with kernels=torch the loss is split outside of graphs", "try layers, or kernels=fused"),
    ]  # fmt: skip


def _unsharded(optimizer: object) -> str | None:
    """Return the name of an optimizer whose step uses operations that torch does not have for DTensors."""
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.Rprop):
        return type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad) and any(
        group["fused"] for group in optimizer.param_groups
    ):
        return f"{type(optimizer).__name__} with fused=true"
    return None


def problems(
    options: Options, rows: Iterable[Row], value: object = None, plan: BatchPlan | None = None
) -> Iterator[Problem]:
    """Yield the rows that apply as problems, with the numbers of ``plan``; ``value``: of an option elsewhere."""
    shown = "selective" if isinstance(value, Selective) else _unsharded(value) or value
    numbers = plan.as_dict() if plan else {}
    for is_ruled_out, option, rule, remedy in rows:
        if is_ruled_out:
            name = option.removeprefix("parallel.")
            yield Problem(option, numbers.get(name, getattr(options, name, shown)), rule, remedy)
