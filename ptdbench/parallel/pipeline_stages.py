"""The stages of a pipeline: how a model is split, which weights stages share, and the rules of a split.

A weight that two stages share has a copy in each, even if both are on one rank: DDP and FSDP wrap each stage, and
would otherwise reduce the gradient twice.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptdbench.local_part import local_part
from ptdbench.models.protocol import FlopsUnknown, Model, Tied, members, module_of, runner
from ptdbench.models.stages import Loose
from ptdbench.nested import map_tensors
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.options import Options
from ptdbench.problems import divides, require


@dataclass(frozen=True)
class StageSplit:
    """A split of a model into stages."""

    stages: Sequence[Sequence[str]]  #: The names of each stage's parts, in the model's order.
    ranks: Sequence[int]  #: Each stage's rank in the pipeline.
    holds: Sequence[Sequence[str]]  #: The names of each stage's submodules: its parts, or their members.

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def owner(self, weight: str) -> int:
        """Return the stage that holds a weight, given its full name."""
        return next(
            number
            for number, names in enumerate(self.holds)
            if any(f"{weight}.".startswith(f"{name}.") for name in names)
        )


def split_stages(model: Model, ranks: Sequence[int]) -> StageSplit:
    """Split a model that is a chain of parts into stages of nearly equal cost; ``ranks``: of the stages.

    Costs are balanced, not numbers of layers: the head of a small model with a large vocabulary can outweigh several
    layers.
    """
    parts = model.parts() or {}
    names = list(parts)
    empty = [number for number, part in enumerate(parts.values()) if next(part.parameters(), None) is None]
    stages = [names[run.start : run.stop] for run in balance(costs(model, parts), len(ranks), empty)]
    holds = [[member for name in stage for member in members(name, parts[name])] for stage in stages]
    return StageSplit(stages, ranks, holds)


def costs(model: Model, parts: Mapping[str, nn.Module]) -> list[float]:
    """Return the cost of each part: the FLOPs that the model states or counts, else its number of parameters."""
    if flops := _flops(model, parts):
        return flops
    return [sum(weight.numel() for weight in part.parameters()) for part in parts.values()]


def _flops(model: Model, parts: Mapping[str, nn.Module]) -> list[float]:
    """Return the FLOPs of each part; empty if they are unknown."""
    with suppress(FlopsUnknown):
        stated = model.train_flops()
        if parts.keys() <= stated.keys():
            return [stated[name] for name in parts]
    counted = counts() if (counts := getattr(model, "flops_of_modules", None)) else {}
    flops = [sum(counted.get(member, 0.0) for member in members(name, part)) for name, part in parts.items()]
    return flops if any(flops) else []


#: A pipeline's most expensive rank may cost this many times the mean before that is remarked on.
_EVEN = 1.25


def imbalance(model: Model, split: StageSplit) -> str | None:
    """Say how uneven the stages of ranks are, why, and what to try; ``None`` if none has much more than the mean.

    A pipeline whose slowest rank has the share ``s`` of the cost is at most ``1 / s`` times as fast as one rank.
    """
    parts = model.parts() or {}
    of_parts = dict(zip(parts, costs(model, parts), strict=True))
    of_ranks, total = dict.fromkeys(sorted(split.ranks), 0.0), sum(of_parts.values()) or 1.0
    for rank, names in zip(split.ranks, split.stages, strict=True):
        of_ranks[rank] += sum(of_parts[name] for name in names) / total
    share, count = max(of_ranks.values()), len(of_ranks)
    if share * count <= _EVEN:
        return None
    kind = "FLOPs" if _flops(model, parts) else "weights"
    largest = max(of_parts, key=of_parts.__getitem__)
    if of_parts[largest] * count > _EVEN * total:
        cause, remedy = f"{largest} alone has {of_parts[largest] / total:.0%}", "fewer stages, or parallel=fsdp"
    else:
        places = f"only {len(parts) - 1} places" if len(parts) > 2 else "one place"
        cause, remedy = f"the model has {places} to split it", "parts() with shorter ones, or parallel=fsdp"
    shares = " : ".join(f"{100 * part:.0f}" for part in of_ranks.values())
    return f"stages {shares} of the {kind}, as {cause}: at most {1 / share:.2f} times as fast as one rank; try {remedy}"


class Stage(nn.Module):
    """Consecutive parts of a model under their dotted names in it.

    Weights, checkpoints and gradients therefore have the same names for any number of stages.
    """

    def __init__(self, model: Model, names: Sequence[str]) -> None:
        super().__init__()
        parts = model.parts() or {}
        for name, module in (item for part in names for item in members(part, parts[part]).items()):
            *path, leaf = name.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in holder._modules:
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            if isinstance(module, Loose):
                holder.register_parameter(leaf, module.weight)
            else:
                holder.add_module(leaf, module)
        self._chain = [parts[name] for name in names]
        self._run = runner(model, names)
        self._is_last = names[-1] == [*parts][-1]

    def forward(self, *arrived: Tensor, batch: tuple[Any, Any] = (None, None)) -> Any:
        """Return what the next stage needs; on the last stage, with targets, the mean loss as ``(1,)``.

        The loss is not a scalar because the schedule concatenates the results of micro-batches along a dimension.

        Args:
            arrived: The tensors that the stage before has sent.
            batch: The model's inputs, and its targets or ``None``.
        """
        inputs, targets = batch
        hidden = [_ContiguousGradient.apply(tensor) if tensor.requires_grad else tensor for tensor in arrived]
        if self._run:
            sent = self._run(self, hidden, inputs, targets)
        else:
            sent = hidden[0] if hidden else inputs
            for part in self._chain[:-1]:
                sent = part(sent)
            sent = self._chain[-1](sent, *([targets] if self._is_last and targets is not None else []))
        if self._is_last and targets is not None:
            return sent.reshape(1).clone()  # FSDP does not accept a view
        # Messages must be contiguous, and images may be channels-last.
        return map_tensors(Tensor.contiguous, sent)


def united(modules: Sequence[nn.Module]) -> nn.Module:
    """Return one module with the submodules and weights of several stages, under the same names."""
    if len(modules) == 1:
        return modules[0]
    whole, children = nn.Module(), dict[str, list[nn.Module]]()
    for module in modules:
        whole._parameters |= module._parameters
        for name, child in module.named_children():
            children.setdefault(name, []).append(child)
    for name, several in children.items():
        whole.add_module(name, united(several))
    return whole


class _ContiguousGradient(torch.autograd.Function):
    """Marks the input from another stage, so that the gradient to send back is contiguous.

    Since torch 2.14 a stage receives gradients into memory with the strides of a trial pass.
    """

    @staticmethod
    def forward(ctx: Any, arrived: Tensor) -> Tensor:
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def balance(costs: Sequence[float], stages: int, empty: Collection[int] = ()) -> list[range]:
    """Split ``costs`` into ``stages`` non-empty runs with the smallest possible maximum sum.

    A pipeline is as fast as its slowest stage. Of equally good splits, the one with shorter early stages is chosen, as
    under 1F1B earlier stages hold more micro-batches in memory. Each run is a range of part indices; if possible, none
    consists only of ``empty`` parts, which have no weights.

    Raises:
        ValueError: There are more stages than parts.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"cannot split {len(costs)} parts into {stages} stages")
    before = list(accumulate(costs, initial=0.0))

    def cost_of(start: int, end: int) -> float:
        return math.inf if all(part in empty for part in range(start, end)) else before[end] - before[start]

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        """Return the lowest cost of the slowest of ``left`` stages from part ``start`` on, and the end of the first."""
        if left == 1:
            return cost_of(start, len(costs)), len(costs)
        last_end = len(costs) - left + 1
        return min((max(cost_of(start, end), best(end, left - 1)[0]), end) for end in range(start + 1, last_end + 1))

    runs, start = [], 0
    for left in range(stages, 0, -1):
        end = best(start, left)[1]
        runs.append(range(start, end))
        start = end
    return runs


@dataclass(frozen=True)
class Shared:
    """This rank's copies of a weight that several stages share."""

    #: The copy, or its shard, to use where the weight counts only once; ``None`` on other ranks.
    first: nn.Parameter | None
    others: Sequence[nn.Parameter]
    #: Global ranks, including this one, that hold a copy or a shard of it in the same replica.
    ranks: Sequence[int]


def by_stage(tied: Tied, split: StageSplit) -> list[dict[int, list[str]]]:
    """Return the names in each stage of each weight that several stages share."""
    first: dict[str, str] = {}
    stages_of: dict[str, dict[int, list[str]]] = {}
    for original, other in tied:
        first[other] = name = first.get(original, original)
        stages = stages_of.setdefault(name, {split.owner(name): [name]})
        stages.setdefault(split.owner(other), []).append(other)
    return [stages for stages in stages_of.values() if len(stages) > 1]


def untie(model: Model, tied: Tied, split: StageSplit) -> None:
    """Copy weights that several stages of a rank share, so that each stage has its own, on the same device."""
    module = module_of(model)
    for stages in by_stage(tied, split):
        holders: set[int] = set()
        for stage, names in stages.items():
            if split.ranks[stage] in holders:
                weight = module.get_parameter(names[0])
                copy = nn.Parameter(weight.detach().clone(), weight.requires_grad)
                for name in names:
                    path, _, leaf = name.rpartition(".")
                    setattr(module.get_submodule(path), leaf, copy)
            holders.add(split.ranks[stage])


def find_shared(tied: Tied, module: nn.Module, split: StageSplit, group: dist.ProcessGroup) -> list[Shared]:
    """Find the trained weights of this rank that stages share, and make their copies equal."""
    weights = dict(module.named_parameters(remove_duplicate=False))  # reading an attribute may return the local part
    place = dist.get_rank(group)
    shared = []
    for stages in by_stage(tied, split):
        copies = [weights[name] for stage, (name, *_) in stages.items() if split.ranks[stage] == place]
        if not copies:
            continue
        for other in copies[1:]:
            local_part(other.detach()).copy_(local_part(copies[0].detach()))
        if not copies[0].requires_grad:
            continue  # frozen: no gradients to sum
        first, others = (copies[0], copies[1:]) if split.ranks[next(iter(stages))] == place else (None, copies)
        ranks = sorted({dist.get_global_rank(group, split.ranks[stage]) for stage in stages})
        shared.append(Shared(first, others, ranks))
    return shared


def add_up_shared(weights: Sequence[Shared], group: dist.ProcessGroup) -> None:
    """Sum the gradients of each shared weight, in the same order on all ranks, so that all copies stay equal."""
    for weight in weights:
        gradients = [_gradient(copy) for copy in (weight.first, *weight.others) if copy is not None]
        total, *others = _exchange(sum(gradients[1:], gradients[0]), weight.ranks, group)
        for other in others:
            total += other
        for gradient in gradients:
            gradient.copy_(total)


def _exchange(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange a tensor among ``ranks``, which include this one; return the tensors of all."""
    tensors = [tensor if rank == dist.get_rank() else torch.empty_like(tensor) for rank in ranks]
    messages = []
    for rank, copy in zip(ranks, tensors, strict=True):
        if copy is not tensor:
            messages.append(dist.P2POp(dist.isend, tensor.contiguous(), rank, group))
            messages.append(dist.P2POp(dist.irecv, copy, rank, group))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return tensors


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return local_part(weight.grad)


def divide_batch(
    options: Options, dims: Dims, global_batch: int, share: int, micro_batch: int | Literal["auto"]
) -> BatchPlan:
    """Split a replica's ``share`` of the batch into passes of micro-batches; raise ConfigError if it does not fit."""
    schedule, size, per_rank = options.pipeline_schedule, dims.pipeline, options.stages_on_rank
    total = share if micro_batch == "auto" else share // micro_batch
    whole = "a replica's share of the batch" if micro_batch == "auto" else "the micro-batches of a replica's step"
    automatic = schedule.busy if micro_batch == "auto" else schedule.most
    count = automatic(total, size, per_rank) if options.microbatches == "auto" else options.microbatches
    require(divides("microbatches", count, total, f"{whole}, {total}"))
    accumulation = 1 if micro_batch == "auto" else total // count
    each = share // (count * accumulation)
    return BatchPlan(dims, global_batch, each, count, accumulation)
