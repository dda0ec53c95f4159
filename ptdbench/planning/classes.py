"""Classes of ranks that behave alike: one rank of each class is run, and stands for the others.

If there are more classes than cores, their ranks are run in groups; :func:`merged` combines the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from torch import nn

from ptdbench.models.protocol import module_of
from ptdbench.optim.groups import rules
from ptdbench.parallel.footprint import modules_of_ranks
from ptdbench.parallel.tensor import cut_dimensions
from ptdbench.parallel.zero import assign_owners
from ptdbench.setup.training_spec import TrainingSpec

#: All stages of pipelines up to this length are run; of longer ones, the first, the last two, and one of each kind
#: between.
_ALL_STAGES = 4


def classes(training: TrainingSpec) -> dict[int, int]:
    """Return one rank of each class, in ascending order, with the number of ranks that it stands for, itself included.

    Copies of a shard, and tensor-parallel ranks, behave alike. Every stage is a class. In a long pipeline, a stage
    stands for later ones with weights of the same shapes, as these have no more micro-batches in flight. If a weight
    cannot be sharded evenly, its last shard is smaller than the first. If replicas, and ranks that share a sequence,
    divide the optimizer state, those with the state of weights of the same shapes are one class.
    """
    dims = training.layout.dims
    held = modules_of_ranks(training.model, training.strategy.stage_ranks(dims))
    found = {}
    for stage, standing in _stages(held).items():
        places = _places(training, held[stage])
        of_stage, parts = dims.world_size // dims.pipeline * standing, sum(part for _, part in places)
        for place, part in places:
            found[rank_at(training, {**place, "pipeline": stage})] = of_stage * part // parts
    return dict(sorted(found.items()))


def _places(training: TrainingSpec, held: Sequence[nn.Module]) -> list[tuple[dict[str, int], int]]:
    """Return the places of a stage's ranks that differ, each with the relative number of ranks like it."""
    dims, strategy = training.layout.dims, training.strategy
    if strategy.shards(dims) and _is_uneven(training):  # the last shard of each copy differs from all others
        last = {name: getattr(dims, name) - 1 for name in dims.order("weights")}
        return [({}, dims.shards - 1), (last, 1)]
    if strategy.replicates(dims) and strategy.optimizer == "zero1":
        names, rules_of = dims.order("samples", "positions"), rules(module_of(training.model))
        places = [*product(*(range(getattr(dims, name)) for name in names))]
        owned = [Counter[Any]() for _ in places]
        for module in held:
            trained = [weight for weight in module.parameters() if weight.requires_grad]
            owners = assign_owners([weight.numel() for weight in trained], len(owned))
            for owner, weight in zip(owners, trained, strict=True):
                owned[owner][rules_of[weight], weight.shape, weight.dtype] += 1
        alike = Counter(owned.index(one) for one in owned)
        return [(dict(zip(names, places[owner], strict=True)), count) for owner, count in alike.items()]
    return [({}, 1)]


def rank_at(training: TrainingSpec, place: dict[str, int]) -> int:
    """Return the rank at a place of the mesh; omitted dimensions are 0."""
    rank = 0
    for name in training.layout.dims.order():
        rank = rank * getattr(training.layout.dims, name) + place.get(name, 0)
    return rank


def _stages(held: Sequence[Sequence[nn.Module]]) -> dict[int, int]:
    """Return the pipeline stages to run, and how many stages each stands for; ``held`` are the modules of each."""
    count = len(held)
    if count <= _ALL_STAGES:
        return dict.fromkeys(range(count), 1)
    shapes = [[weight.shape for part in of_rank for weight in part.parameters()] for of_rank in held]
    alike = Counter(shapes.index(shapes[stage], 1) for stage in range(1, count - 2))
    return {0: 1, **alike, count - 2: 1, count - 1: 1}


def _is_uneven(training: TrainingSpec) -> bool:
    """Return whether some weight cannot be cut into equal shards."""
    dims, weights = training.layout.dims, module_of(training.model).parameters()
    dimensions = cut_dimensions(training.model) if dims.tensor > 1 else {}
    firsts = ((weight.shape[0] if weight.dim() else 1, dimensions.get(weight) == 0) for weight in weights)
    return any((first // dims.tensor if is_cut else first) % dims.shards for first, is_cut in firsts)


#: The fields of ``virtual`` with a number for each rank.
_OF_RANKS = ("ranks", "allocated_bytes", "reserved_bytes", "communicators", "host_seconds")


def merged(records: Sequence[Mapping[str, Any]], standing: Mapping[int, int]) -> dict[str, Any]:
    """Combine records of different ranks into one.

    Args:
        records: In ascending order of their ranks; a record with messages covers a single rank.
        standing: The number of ranks that each rank stands for.
    """
    first = dict(records[0])
    if len(records) == 1:
        return first
    virtual = [record["virtual"] for record in records]
    known = [name for name in _OF_RANKS if virtual[0][name] is not None]
    first["virtual"] = virtual[0] | {name: [n for one in virtual for n in one[name]] for name in known}
    first["virtual"] |= {"kernels": _lists(virtual, "kernels"), "messages": _messages(virtual, standing)}
    first["virtual"]["reason"] = next((one["reason"] for one in virtual if one.get("reason")), None)
    memory: list[Any] = [record.get("memory") for record in records]
    if all(one and not one.get("reason") for one in memory):
        first["memory"] = {
            **memory[0],
            "ranks": _lists(memory, "ranks"),
            "moments": [word for one in memory for word in one["moments"]],
            "pass_seconds": sum(one["pass_seconds"] for one in memory),
        }
    metrics = [record["metrics"] for record in records]
    peaks = {name: max(one[name] for one in metrics) for name in ("peak_memory_bytes", "peak_reserved_bytes")}
    first["metrics"] = metrics[0] | peaks
    return first


def _lists(parts: Sequence[Any], name: str) -> dict[str, list[int]]:
    """Concatenate the lists of each kind, with zeros for parts that lack the kind."""
    kinds = dict.fromkeys(kind for part in parts for kind in part[name])
    sizes = [len(part.get("ranks") if name == "kernels" else part["moments"]) for part in parts]
    return {
        kind: [n for part, size in zip(parts, sizes, strict=True) for n in part[name].get(kind, [0] * size)]
        for kind in kinds
    }


def _messages(parts: Sequence[Any], standing: Mapping[int, int]) -> dict[str, dict[str, Any]]:
    """Return each operation's mean over all ranks; bytes are known only if all ranks that call it know theirs."""
    counts = [sum(standing[rank] for rank in part["ranks"]) for part in parts]
    total = sum(counts)
    found = {}
    for operation in dict.fromkeys(name for part in parts for name in part["messages"]):
        have = [
            (part["messages"][operation], count)
            for part, count in zip(parts, counts, strict=True)
            if operation in part["messages"]
        ]
        known = all(one["bytes"] is not None for one, _ in have)
        found[operation] = {
            "calls": sum(one["calls"] * count for one, count in have) / total,
            "bytes": sum(one["bytes"] * count for one, count in have) / total if known else None,
            "formula_bytes": next((one["formula_bytes"] for one, _ in have if one["formula_bytes"] is not None), None),
        }
    return found
