"""The degrees of parallelism, and the mesh of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

from ptdbench.problems import Problem, require, try_these

Degree = int | Literal["auto"]

#: From the dimension whose neighbors may be farthest apart to the one with the most communication. Stages are inside
#: copies, so that activations stay inside a node.
ORDER = ("replicate", "pipeline", "shard", "context", "tensor")

#: The order in which ``auto`` degrees are derived.
DERIVED = ("pipeline", "tensor", "shard", "replicate")


@dataclass(frozen=True)
class Dims:
    """The degrees of parallelism, which multiply to the world size.

    Attributes:
        replicate: Copies of the model.
        shard: Ranks that share the weights of one copy; each takes a share of its batch.
        context: Ranks that share a sequence.
        tensor: Ranks that share each matrix product.
        pipeline: Ranks that share the layers of a copy, each with one stage or several.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(asdict(self).values())

    @property
    def batch(self) -> int:
        """Number of shares that the global batch is divided into."""
        return self.replicate * self.shard

    def stage(self, rank: int) -> int:
        """The position of a rank in its pipeline, by the order of the mesh."""
        return rank // (self.shard * self.context * self.tensor) % self.pipeline


def derive(world_size: int, wanted: Mapping[str, Degree]) -> Dims:
    """Derive the degrees of a run.

    Of several degrees that are ``auto``, in the order pipeline, tensor, shard, replicate, each but the last is the
    smallest divisor above 1 of what is left, and the last one is all that is left.

    Args:
        world_size: Ranks in all.
        wanted: Each degree, or ``auto``.

    Raises:
        ConfigError: The degrees do not multiply to the world size; with the equation and values that fit.
    """
    given = {name: degree for name, degree in wanted.items() if degree != "auto"}
    waiting = [name for name in DERIVED if wanted[name] == "auto"]
    rest, odd = divmod(world_size, math.prod(given.values()))
    if odd or (rest != 1 and not waiting):
        require(_unequal(world_size, wanted))
    derived = dict(given)
    for name in waiting:
        is_last = name == waiting[-1]
        derived[name] = rest if is_last or rest == 1 else divisors(rest)[1]
        rest //= derived[name]
    return Dims(**derived)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _unequal(world_size: int, wanted: Mapping[str, Degree]) -> Problem:
    """The violated equation, reported for a degree that can be changed, with the values of it that fit."""
    product = math.prod(degree for degree in wanted.values() if degree != "auto")
    factors = " x ".join(f"{name}({degree})" for name, degree in wanted.items() if degree != 1)
    relation = factors if "auto" in wanted.values() else f"{factors} = {product}"
    rule = f"{relation} must be the number of ranks, {world_size}"
    given = [name for name, degree in wanted.items() if degree not in (1, "auto")]
    if not given:
        rule = f"all degrees of parallelism are 1, and there are {world_size} ranks"
        return Problem("replicate", 1, rule, try_these([world_size, "auto", "or cluster.ranks_per_node=1"]))
    fits = {name: _fitting(world_size, wanted, name) for name in given}
    name = next((name for name in reversed(given) if fits[name]), given[-1])
    remedy = try_these(fits[name]) or try_these([f"a number of ranks of {product}", "or auto for one of the degrees"])
    return Problem(name, wanted[name], rule, remedy)


def _fitting(world_size: int, wanted: Mapping[str, Degree], name: str) -> list[int]:
    """Values above 1 of one degree that fit the others."""
    others = math.prod(degree for other, degree in wanted.items() if degree != "auto" and other != name)
    rest, odd = divmod(world_size, others)
    if odd or rest == 1:
        return []
    return divisors(rest)[1:] if "auto" in wanted.values() else [rest]


class Mesh:
    """The mesh of ranks, seen from one of them.

    Attributes:
        batch: The ranks with the same part of the model and different samples.
        copies: Those over which the gradients of whole weights are averaged: they differ in samples, or in
            the positions of a sequence.
        shard: Those over which weights are sharded; with several copies the first of two dimensions is the copies.
        replicate: The ranks with the same part of each copy; ``None`` for one copy, unless nothing is sharded.
        pipeline: The ranks with the stages of one copy; ``None`` for one stage.
        tensor: The ranks that share each matrix product; ``None`` if each has its own.
        context: The ranks that share each sequence; ``None`` if each has its own.

    Args:
        dims: The degrees.
        device_type: ``cpu`` or ``cuda``.
    """

    def __init__(self, dims: Dims, device_type: str) -> None:
        _forget_plans()
        # One of the two dimensions of the batch always exists, even with a single rank. Copies of DTensors are kept
        # equal by FSDP, which asks for the ranks that it shards over, if only one.
        always = {"replicate"} if dims.batch == 1 else set()
        if dims.tensor > 1 and dims.replicate * dims.context > 1:
            always.add("shard")
        names = tuple(name for name in ORDER if getattr(dims, name) > 1 or name in always)
        grid = init_device_mesh(device_type, tuple(getattr(dims, name) for name in names), mesh_dim_names=names)
        self.replicate = grid["replicate"] if "replicate" in names else None
        self.pipeline = grid["pipeline"] if "pipeline" in names else None
        self.tensor = grid["tensor"] if "tensor" in names else None
        self.context = grid["context"] if "context" in names else None

        def flat(*wanted: str) -> DeviceMesh:
            """These dimensions as one, as far as there are any."""
            found = tuple(name for name in wanted if name in names)
            return grid[found] if len(found) == 1 else grid[found]._flatten("_".join(found))

        self.batch = flat("replicate", "shard")
        self.copies = flat("replicate", "shard", "context")
        self.shard = self.batch
        if {"shard", "context"} & set(names):
            self.shard = flat("shard", "context")
            if dims.replicate > 1:
                self.shard = grid["replicate", "_".join(self.shard.mesh_dim_names or ())]


def _forget_plans() -> None:
    """Let DTensors plan afresh: torch keeps plans by the shape of a mesh, with the groups of the run before.

    These are gone where ranks carry out one run of a sweep after the other.
    """
    # What torch.distributed.tensor.debug does, which takes half a second to import.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
