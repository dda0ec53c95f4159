"""Classes of ranks that do identical work: one rank of each class runs, and represents the others.

If there are more classes than cores, their ranks run in groups; :func:`merged` combines the records.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any

from msgspec.structs import replace
from torch import nn

from ptdbench.models.protocol import module_of
from ptdbench.optim.groups import rules
from ptdbench.parallel.footprint import modules_of_ranks
from ptdbench.parallel.replicas import assign_owners
from ptdbench.parallel.tensor import split_dimensions
from ptdbench.profiling.phases import KINDS
from ptdbench.records.record import merged_accounts
from ptdbench.records.schema import Memory, Record
from ptdbench.setup.training_spec import TrainingSpec

#: All stages of pipelines up to this length run; of longer ones the first, the last two, and one of each kind between.
_ALL_STAGES = 4


def classes(training: TrainingSpec) -> dict[int, int]:
    """Return one rank of each class, in ascending order, with the number of ranks that it represents, itself included.

    Replicas of a shard, and tensor-parallel ranks, do identical work. Every stage is a class; in a long pipeline one
    represents later ones with weights of the same shapes, which have no more micro-batches in flight. If a weight
    cannot be sharded evenly, its last shard is smaller. If the optimizer state is sharded over replicas, those with
    the state of weights of the same shapes are one class.
    """
    dims = training.layout.dims
    held = modules_of_ranks(training.model, training.strategy.stage_ranks(dims))
    counts = {}
    for stage, standing in _stages(held).items():
        places = _places(training, held[stage])
        of_stage, parts = dims.world_size // dims.pipeline * standing, sum(part for _, part in places)
        for place, part in places:
            counts[rank_at(training, {**place, "pipeline": stage})] = of_stage * part // parts
    return dict(sorted(counts.items()))


def _places(training: TrainingSpec, held: Sequence[nn.Module]) -> list[tuple[dict[str, int], int]]:
    """Return the places of a stage's ranks that differ, each with the relative number of ranks like it."""
    dims, strategy = training.layout.dims, training.strategy
    if strategy.shards(dims) and _is_uneven(training):  # the last shard of each replica differs from all others
        last = {name: getattr(dims, name) - 1 for name in dims.order("weights")}
        return [({}, dims.shards - 1), (last, 1)]
    if strategy.replicates(dims) and strategy.optimizer == "zero1":
        names, rules_of = dims.order("samples", "positions"), rules(module_of(training.model))
        places = [*product(*(range(getattr(dims, name)) for name in names))]
        states = [Counter[Any]() for _ in places]
        for module in held:
            trained = [weight for weight in module.parameters() if weight.requires_grad]
            owners = assign_owners([weight.numel() for weight in trained], len(states))
            for owner, weight in zip(owners, trained, strict=True):
                states[owner][rules_of[weight], weight.shape, weight.dtype] += 1
        alike = Counter(states.index(state) for state in states)
        return [(dict(zip(names, places[owner], strict=True)), count) for owner, count in alike.items()]
    return [({}, 1)]


def rank_at(training: TrainingSpec, place: dict[str, int]) -> int:
    """Return the rank at a place of the mesh; omitted dimensions are 0."""
    rank = 0
    for name in training.layout.dims.order():
        rank = rank * getattr(training.layout.dims, name) + place.get(name, 0)
    return rank


def _stages(held: Sequence[Sequence[nn.Module]]) -> dict[int, int]:
    """Return the pipeline stages to run, and how many stages each represents; ``held``: the modules of each."""
    count = len(held)
    if count <= _ALL_STAGES:
        return dict.fromkeys(range(count), 1)
    shapes = [[weight.shape for part in of_rank for weight in part.parameters()] for of_rank in held]
    alike = Counter(shapes.index(shapes[stage], 1) for stage in range(1, count - 2))
    return {0: 1, **alike, count - 2: 1, count - 1: 1}


def _is_uneven(training: TrainingSpec) -> bool:
    """Return whether some weight cannot be split into equal shards."""
    dims, weights = training.layout.dims, module_of(training.model).parameters()
    dimensions = split_dimensions(training.model) if dims.tensor > 1 else {}
    firsts = ((weight.shape[0] if weight.dim() else 1, dimensions.get(weight) == 0) for weight in weights)
    return any((first // dims.tensor if is_split else first) % dims.shards for first, is_split in firsts)


def merged(records: Sequence[Record], stands_for: Mapping[int, int]) -> Record:
    """Combine records of different ranks, in ascending order; ``stands_for``: how many ranks each represents."""
    of_ranks = [record.virtual for record in records if record.virtual]
    memories = [record.memory for record in records if record.memory and record.memory.ranks]
    metrics = [record.metrics for record in records if record.metrics]
    first = replace(records[0], virtual=merged_accounts(of_ranks, stands_for))
    if first.memory and len(memories) == len(records):
        first.memory = Memory(
            ranks={kind: [*chain(*((memory.ranks or {})[kind] for memory in memories))] for kind in KINDS},
            moments=[*chain(*(memory.moments or () for memory in memories))],
        )
    if first.metrics:
        first.metrics.peak_memory_bytes = max(of_ranks.peak_memory_bytes or 0 for of_ranks in metrics)
        first.metrics.peak_reserved_bytes = max(of_ranks.peak_reserved_bytes or 0 for of_ranks in metrics)
    return first
