"""DistributedDataParallel: replicates a module on every rank and averages gradients during the backward pass."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ptdbench.parallel.engine import LaidOutModule
from ptdbench.parallel.options import Options
from ptdbench.parallel.setting import Setting
from ptdbench.parallel.zero import Zero1
from ptdbench.problems import ConfigError, Problem, message_of, require

#: Communication hooks that average a bucket in a narrower dtype than its own.
_NARROW = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}

#: Each replica keeps its own batch norm statistics: evaluations synchronize them, and checkpoints store one replica's.
#: By default torch broadcasts the first replica's before each forward pass; the option was renamed in 2.14.
_IS_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _IS_RENAMED else "broadcast_buffers": False}

#: Parts of torch's messages about a pass that used other weights than the first pass, or not all.
_CHANGED = ("training graph has changed", "finished reduction in the prior iteration")


def replicate(module: nn.Module, setting: Setting, options: Options) -> LaidOutModule:
    """Wrap a module whose weights are materialized: DDP compares their shapes across replicas and builds buckets.

    The first forward pass after one backward pass (two under ``static_graph``) rebuilds the buckets in the order of
    the gradients, unless DDP looks for unused weights in each pass. An element's position in its bucket determines the
    order in which three or more ranks sum it, and so the rounding.
    """
    group, static_graph = setting.mesh.dp_cp.get_group(), options.has_static_graph(setting.layout)
    # Averaging after the backward pass does not tell DDP which weights a pass has used.
    finds_unused = options.static_graph == "find_unused" and not options.pipeline_schedule.splits_backward
    gradients = sum(weight.numel() * weight.element_size() for weight in module.parameters() if weight.requires_grad)
    replica = DistributedDataParallel(
        module,
        device_ids=[setting.device] if setting.device.type == "cuda" else None,
        process_group=group,
        **_OWN_BUFFERS,
        bucket_cap_mb=bucket_size(gradients) if options.bucket_mb == "auto" else options.bucket_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=finds_unused,
    )
    is_complete = static_graph or finds_unused or options.pipeline_schedule.splits_backward
    if hook := _NARROW.get(options.sent):
        replica.register_comm_hook(group, hook)
    return LaidOutModule(
        module,
        replica,
        replica.no_sync,
        partial(_explaining, options.static_graph),
        average=partial(_average, replica),
        # A static graph knows which gradients are missing; averaging after the backward pass uses zeros for them.
        settle=(lambda: None) if is_complete else partial(_require_all, module, options.static_graph),
        settles_after=2 if static_graph else 1,
        division=Zero1(module, group) if options.optimizer == "zero1" else None,
    )


def _average(replica: DistributedDataParallel) -> None:
    """Average existing gradients with the same buckets and hooks, through a backward pass that adds zeros."""
    trained = [weight for weight in replica.module.parameters() if weight.requires_grad]
    zeros = [torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight) for weight in trained]
    replica.reducer.prepare_for_backward([])
    torch.autograd.backward(trained, zeros)


@contextmanager
def _explaining(static_graph: bool | str) -> Iterator[None]:
    """Replace torch's error about a model that does not use the same weights in each pass by a problem of an option."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in message_of(error) for text in _CHANGED):
            raise
        rule = "some weights get gradients only in some steps or on some ranks, so DDP must look for them in each pass"
        remedy = "try find_unused, or parallel=fsdp if all ranks use the same ones"
        raise ConfigError([Problem("parallel.static_graph", static_graph, rule, remedy)]) from error


def _require_all(module: nn.Module, static_graph: bool | str) -> None:
    """Refuse weights without a gradient: DDP would wait for them, and then suggest an option that is not ours."""
    names = [name for name, weight in module.named_parameters() if weight.requires_grad and weight.grad is None]
    if names:
        rule = f"without a static graph DDP needs a gradient of every weight, and there is none of {', '.join(names)}"
        remedy = "freeze unused weights, requires_grad_(False), or try find_unused, which looks for them in each pass"
        require(Problem("parallel.static_graph", static_graph, rule, remedy))


def bucket_size(gradients: int) -> float:
    """Return the bucket size in MiB for so many bytes of gradients: a twentieth, at least 25 and at most 100.

    The reduction of the last bucket is exposed, so a bucket should be a small fraction of the total, yet large enough
    for the full bandwidth of a link: 25 is DDP's default, and torchtitan uses 100 for large models.
    """
    return float(min(max(gradients / 2**20 / 20, 25), 100))
