"""Conflicts of options: a table of conditions, the options that they rule out, the reasons, and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

import torch
from torch.distributed.fsdp import FSDPModule

from ptdbench.models.protocol import Model
from ptdbench.parallel import fp8, ring, tensor
from ptdbench.parallel.activations import Selective
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import Dims, divisors
from ptdbench.parallel.options import Options
from ptdbench.parallel.roles import roles_of
from ptdbench.problems import Problem, as_typed, try_these

#: Whether the option is ruled out, the option, the rule, and a remedy.
Row = tuple[object, str, str, str]

_DEFAULTS = {field.name: field.default for field in fields(Options)}

#: FSDP's setters for options that not every version of torch has.
SETTERS = {
    "separate_reduce_scatter": "set_separate_reduce_scatter_group",
    "reduce_scatter_buffers": "set_reduce_scatter_max_input_buffers",
    "message_buffers": "set_symm_mem_for_comm",
}


def is_settable(option: str) -> bool:
    """Return whether this version of torch has the option's setter, one of :data:`SETTERS`."""
    return hasattr(FSDPModule, SETTERS[option])


_NO_EFFECT = "has no effect under these degrees of parallelism"
_SHARED = "needs memory that GPUs write to each other"
_1F1B = "parallel.schedule=interleaved1f1b"


def of_values(how: Options) -> list[Row]:
    """Return values that are invalid whatever the degrees."""
    lacks = ring.missing() if how.context_method == "ring" else None
    here = f"torch {torch.__version__} does not have"
    return [
        (how.bucket_mb != "auto" and how.bucket_mb <= 0, "bucket_mb", "must be greater than 0 (MiB)", "try auto, 25"),
        (lacks, "context_method", f"needs {lacks}, which {here}", "try ulysses"),
        *(
            (getattr(how, option) != _DEFAULTS[option] and not is_settable(option), option,
             f"needs FSDPModule.{setter}, which {here}", f"try {as_typed(_DEFAULTS[option])}")
            for option, setter in SETTERS.items()
        ),
        (how.message_buffers == "symmetric" and how.reduce_scatter_buffers > 1, "reduce_scatter_buffers",
         "must be 1 with parallel.message_buffers=symmetric, which is one buffer", "try 1"),
    ]  # fmt: skip


def of_degrees(how: Options) -> list[Row]:
    """Return options that have no effect, or not the requested one, under the requested degrees."""
    is_one = {name: degree == 1 for name, degree in how.degrees().items()}
    is_set = {name: getattr(how, name) != default for name, default in _DEFAULTS.items()}
    # A degree of auto counts as above 1, as it is on several ranks.
    dims = Dims(**{name: 2 if degree == "auto" else degree for name, degree in how.degrees().items()})
    replicates, compresses = how.replicates(dims), how.gradients == "powersgd"
    # DDP also averages gradients over ranks that share a sequence, and FSDP also shards weights over them.
    ignored = is_one | {"replicate": not replicates, "shard": not how.gathers_weights(dims)}
    reshards_to_group = not isinstance(how.reshard_after_forward, bool)
    return [
        *(
            (ignored[degree] and is_set[option], option, _NO_EFFECT, f"it belongs to {row.preset}")
            for degree, row in how.rows().items()
            for option in row.options
        ),
        (dims.ways("samples", "positions") == 1 and is_set["gradients"],
         "gradients", _NO_EFFECT, "it belongs to parallel=ddp,pdp,fsdp,hsdp"),
        (not is_one["pipeline"] and is_set["reshard_between_microbatches"], "reshard_between_microbatches",
         "has no effect under a pipeline, whose schedule decides when a stage gathers and frees its weights",
         "try auto"),
        (not is_one["pipeline"] and is_set["reduce_scatter_each_microbatch"], "reduce_scatter_each_microbatch",
         "has no effect under a pipeline, whose schedule reduces the gradients of a stage after its last micro-batch",
         "try false"),
        (how.shards(dims) and compresses,
         "gradients", "needs whole gradients, and this layout shards them", "try auto, bf16, or parallel=ddp"),
        *(
            (replicates and not compresses and is_set[option],
             option, "has no effect without parallel.gradients=powersgd", "omit it")
            for option in ("powersgd_rank", "powersgd_start")
        ),
        (how.async_tensor and not how.sequence and not is_one["tensor"], "async_tensor",
         "overlaps products with the messages of sequence parallelism", "try false, or parallel.sequence=true"),
        (reshards_to_group and not (is_one["pipeline"] and is_one["tensor"] and is_one["context"]),
         "reshard_after_forward",
         "makes groups of ranks that only shard, without stages, tensor or context parallelism", "try true, false"),
        (is_one["replicate"] and is_one["shard"] and is_set["sync_batchnorm"],
         "sync_batchnorm", _NO_EFFECT, "it belongs to parallel=ddp,pdp,fsdp,hsdp"),
    ]  # fmt: skip


def of_layout(how: Options, plan: BatchPlan) -> list[Row]:
    """Return the conflicts of a run's degrees and micro-batches with its options."""
    dims, groups = plan.dims, divisors(plan.dims.shard)[1:-1]
    frees, is_static, has_stages = how.reshard_after_forward, how.static_graph is True, how.applies("pipeline", dims)
    return [
        (is_static and has_stages, "static_graph", "gives wrong gradients under a pipeline", "try auto, false"),
        (is_static and not has_stages and plan.accumulation > 1, "static_graph",
         f"is not sound with gradient accumulation, and there are {plan.accumulation} passes a step",
         "try auto, false, or train.micro_batch=auto"),
        (not isinstance(frees, bool) and frees not in groups, "reshard_after_forward",
         f"a number must divide shard({dims.shard}), and lie between 1 and it",
         try_these(["true", "false", *groups])),
        (how.frees_after_forward(dims) and how.splits_backward(dims), "reshard_after_forward",
         f"gives wrong gradients under {how.schedule}, which computes those of weights after other forward passes",
         f"try false, or {_1F1B}"),
    ]  # fmt: skip


def of_option(how: Options, plan: BatchPlan | None, name: str, value: object) -> list[Row]:
    """Return the conflicts with an option outside ``parallel``, such as ``precision``; ``plan``: if it is known."""
    dims = plan.dims if plan else Dims()
    is_ring, splits = how.applies("context", dims) and how.context_method == "ring", how.splits_backward(dims)
    gathers_fp8 = fp8.is_gathered(value, sharded=how.shards(dims))
    rows: dict[str, list[Row]] = {
        "compile": [
            (value == "whole" and is_ring, "compile", "is one graph, and ring attention is not compiled",
             "try layers, or parallel.context_method=ulysses"),
            (value == "whole" and how.shards(dims), "compile",
             "is one graph, and sharded weights are gathered between the graphs of the layers",
             "try layers, or parallel=ddp"),
            (value in (False, "whole") and how.async_tensor, "parallel.async_tensor",
             f"is the compiler's work in each layer, and compile={str(value).lower()}", "try false, or compile=layers"),
            (value and splits, "compile", f"makes one graph of the backward pass, which {how.schedule} splits",
             f"try false, or {_1F1B}"),
        ],
        "activations": [
            (isinstance(value, Selective) and dims.expert > 1, "activations",
             "keeps results in the order of a layer's operations, which gathering the experts of a layer changes",
             "try recompute, keep"),
            (isinstance(value, Selective) and splits, "activations",
             f"has what it keeps for one backward pass, and {how.schedule} takes two",
             f"try recompute, keep, or {_1F1B}"),
        ],
        "offload": [
            (value == "optimizer_and_weights" and not (how.applies("shard", dims) or how.gathers_weights(dims)),
             "offload", "is for sharded weights, and these degrees of parallelism shard none",
             f"try {how.rows()['shard'].preset}"),
        ],
        "backend": [
            ("nccl" not in str(value) and how.message_buffers != "caching", "parallel.message_buffers",
             f"needs NCCL's own memory, and the backend is {value}", "try caching"),
            ("nccl" not in str(value) and how.async_tensor, "parallel.async_tensor",
             f"{_SHARED}, and the backend is {value}", "try false"),
        ],
        "virtual": [
            (value and how.message_buffers == "symmetric", "parallel.message_buffers",
             f"{_SHARED}, which virtual ones lack", "try caching, nccl"),
            (value and how.async_tensor, "parallel.async_tensor", f"{_SHARED}, which virtual ones lack", "try false"),
        ],
        "optimizer": [
            (_unsharded(value) and (how.shards(dims) or dims.tensor > 1), "optimizer._target_",
             "has no step for sharded weights in torch", "try adamw, or parallel=ddp"),
        ],
        "precision": [
            (value == "fp16" and how.gradients == "powersgd", "parallel.gradients",
             "is not for scaled losses: a step that overflows is skipped, and its infinite error would be kept",
             "try auto, or precision=bf16"),
            (value in fp8.RECIPES and how.applies("tensor", dims), "precision",
             "does not support tensor parallelism: its layers take no DTensors", "try bf16"),
            (gathers_fp8 and not isinstance(how.reshard_after_forward, bool), "parallel.reshard_after_forward",
             "is not for weights that are gathered in fp8", "try true, false, or precision=fp8"),
        ],
    }  # fmt: skip
    return rows[name]


def of_gloo(how: Options, dims: Dims, model: Model, *, gathers: bool) -> list[Row]:
    """Return what gloo has only for tensors in host memory; ``gathers``: whether the optimizer gathers sharded updates.

    Most collectives of GPU tensors, all-to-all included, pass through host memory. But to send and to receive, and in
    functional all-gathers such as those of a DTensor's ``redistribute``, gloo takes a GPU's addresses for the host's:
    the rank fails, or dies of SIGSEGV.
    """
    divides, shards = dims.tensor > 1, how.gathers_weights(dims)
    kinds = {role.kind for role in roles_of(model).values()}
    users = {
        "ring attention": dims.context > 1 and how.context_method == "ring",
        "sequence parallelism": divides and how.sequence,
        "a mixture of experts under tensor parallelism": divides and "tokens" in kinds,
        "tensor parallelism for logits": divides and tensor.gathers_logits(model),
        "the optimizer for updates of sharded matrices": gathers and (divides or shards),
    }
    remedy, lack = "try nccl, or device=cpu", "has no functional all-gather of GPU tensors, needed by"
    return [
        (dims.pipeline > 1, "backend", "cannot send GPU tensors, as the stages of a pipeline do", remedy),
        *((is_user, "backend", f"{lack} {user}", remedy) for user, is_user in users.items()),
    ]


def _unsharded(optimizer: object) -> str | None:
    """Return the name of an optimizer whose step uses operations that torch lacks for DTensors."""
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.Rprop):
        return type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad) and any(
        group["fused"] for group in optimizer.param_groups
    ):
        return f"{type(optimizer).__name__} with fused=true"
    return None


def problems(how: Options, rows: Iterable[Row], value: object = None) -> Iterator[Problem]:
    """Yield the rows that apply as problems; ``value``: of an option outside ``parallel``."""
    shown = "selective" if isinstance(value, Selective) else _unsharded(value) or value
    for is_ruled_out, option, rule, remedy in rows:
        if is_ruled_out:
            yield Problem(option, getattr(how, option.removeprefix("parallel."), shown), rule, remedy)
