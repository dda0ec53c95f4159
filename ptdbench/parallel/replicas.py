"""Replicas of a model: DDP averages gradients, ZeRO-1 shards the optimizer state, and checksums compare weights."""

import inspect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ptdbench.launch.collect import gather
from ptdbench.local_part import plain_tensors
from ptdbench.parallel.engine import LaidOutModule
from ptdbench.parallel.options import Options, Setting
from ptdbench.problems import ConfigError, Problem, message_of, require
from ptdbench.terminal import plural, rank_names

K = TypeVar("K", bound=Hashable)

#: Communication hooks that average a bucket in a narrower dtype than its own.
_NARROW = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}

#: Each replica keeps its own batch norm statistics: evaluations synchronize them, and checkpoints store one replica's.
#: By default torch broadcasts the first replica's before each forward pass; the option was renamed in 2.14.
_IS_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _IS_RENAMED else "broadcast_buffers": False}

#: Parts of torch's messages about a pass that used other weights than the first pass, or not all.
_CHANGED = ("training graph has changed", "finished reduction in the prior iteration")

#: Bytes of one message of weights, except for larger weights.
_MESSAGE = 25 << 20

#: Elements that are multiplied at once: a checksum takes 24 MiB, however large the tensors are.
_AT_ONCE = 1 << 20

#: 2^64 divided by the golden ratio, as a signed number: the bits of its multiples have no pattern.
_GOLDEN = -0x61C8864680B583EB


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
        gradient_as_bucket_view=True,  # saves a copy of the gradients
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
        attach=partial(Zero1, module, group) if options.optimizer == "zero1" else lambda _: None,
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


class Zero1:
    """Assigns each replicated weight of a module, unsplit, to one rank of a group.

    torch's ``ZeroRedundancyOptimizer`` keeps its state in an inner optimizer with separate parameter groups, and
    gathers it on one rank to save it. Here the optimizer keeps the parameter groups, gradients and names of all
    weights, but updates only this rank's part, and receives the rest after each step. Clipping, loss scaling, schedules
    and checkpoints therefore work as without ZeRO-1, and a checkpoint can be resumed under any layout.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        owners = assign_owners([weight.numel() for weight in trained], dist.get_world_size(group))
        self._owners = dict(zip(trained, owners, strict=True))
        self._others = [weight for weight, owner in self._owners.items() if owner != dist.get_rank(group)]
        self._group = group
        for weight in self._others:
            optimizer.state.pop(weight, None)  # some optimizers create state before the first step
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._share)

    @torch.no_grad()
    def _share(self, *_: Any) -> None:
        for owner in range(dist.get_world_size(self._group)):
            weights = [weight.detach() for weight, its in self._owners.items() if its == owner]
            if weights:  # coalesced into few messages, as DDP itself broadcasts weights
                dist._broadcast_coalesced(self._group, weights, _MESSAGE, owner)

    def _before_step(self, *_: Any) -> None:
        """Drop the gradients of other replicas' weights: an optimizer skips these, and creates no state for them."""
        for weight in self._others:
            weight.grad = None


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Assign weights of these sizes to replicas: the largest first, each to the replica with the fewest elements."""
    owners, elements = [0] * len(sizes), [0] * replicas
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = elements.index(min(elements))
        elements[owners[number]] += sizes[number]
    return owners


@torch.no_grad()
def checksums(tensors: Iterable[tuple[K, Tensor]]) -> list[tuple[K, int]]:
    """Return a 64-bit checksum of each tensor, or of this rank's shard; wait for the device once.

    Elements are weighted by position, so that swapped elements and changes that cancel out show too.
    """
    factors: dict[torch.device, Tensor] = {}
    keys, sums = [], []
    for key, tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for plain in plain_tensors(tensor.detach()):
            if plain.device not in factors:
                mixed = torch.arange(1, _AT_ONCE + 1, device=plain.device) * _GOLDEN
                factors[plain.device] = (mixed ^ (mixed >> 29)) * _GOLDEN | 1  # an odd factor loses no change
            real = torch.view_as_real(plain) if plain.is_complex() else plain
            bits = real.view(getattr(torch, f"int{8 * real.element_size()}")).flatten()
            for chunk in bits.split(_AT_ONCE):
                total = total * _GOLDEN + (chunk * factors[plain.device][: len(chunk)]).sum()
        keys.append(key)
        sums.append(total)
    device = next((total.device for total in sums if total.device.type != "cpu"), torch.device("cpu"))
    return list(zip(keys, torch.stack([total.to(device) for total in sums]).tolist() if sums else (), strict=True))


def differing(values: Iterable[tuple[K, int]]) -> dict[K, list[list[int]]]:
    """Return, for each key whose value is not the same on all ranks that hold it, the ranks of each value.

    Called in all ranks. Keys are in the order of the first rank that holds them.
    """
    ranks: dict[K, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in enumerate(gather([*values])):
        for key, value in of_rank:
            ranks[key][value].append(rank)
    return {key: [*of_values.values()] for key, of_values in ranks.items() if len(of_values) > 1}


def require_equal(weights: Iterable[tuple[str, Tensor]], apart: Hashable = None) -> None:
    """Compare all copies of weights, or of shards of them; called in all ranks, between two steps.

    Args:
        weights: This rank's weights by full name; tied ones, which another stage may hold, by the same name.
        apart: Ranks for which this differs are not compared.

    Raises:
        RuntimeError: Copies differ; in all ranks, with the first such weight and the ranks.
    """
    parted = differing(checksums(((name, _shard(weight), apart), weight) for name, weight in weights))
    for (name, *_), groups in parted.items():
        most, *odd = sorted(groups, key=len, reverse=True)
        where = f"on {rank_names(sorted(chain(*odd)))} than on rank {most[0]}"
        others = len({other for other, *_ in parted}) - 1
        more = f" (and {plural(others, 'more weight')})" if others else ""
        raise RuntimeError(
            f"replicas differ: {name}{more} has other bits {where}; usually a module initializes weights from its own "
            "samples or random numbers: average over all ranks there, or try parallel=single"
        )


def _shard(weight: Tensor) -> object:
    """Return which part of a weight this rank has: its coordinates in the dimensions of the mesh that shard it."""
    if not isinstance(weight, DTensor):
        return None
    places = enumerate(zip(weight.device_mesh.get_coordinate() or (), weight.placements, strict=True))
    return tuple((dimension, place) for dimension, (place, placement) in places if not placement.is_replicate())
