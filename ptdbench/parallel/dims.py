"""The degrees of parallelism: one table, the fields of :class:`Degrees`; the degrees of a run, and its batch plan.

This module does not import torch, as records and reports list the degrees too. A new degree is a row here; the row
makes it an option of ``parallel``, a dimension of the mesh and a field of records. Its effect on a model is in a
separate file.
"""
# No postponed annotations: setup/signature.py evaluates those that Strategy inherits to check its options.

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from ptdbench.problems import Problem, divides, divisors, require, try_these

#: A requested degree: ``auto`` follows from the number of ranks, ``node`` from the nodes, see :func:`sizes_by_node`.
Size = int | Literal["auto", "node"]
T = TypeVar("T", bound=Size)
D = TypeVar("D", bound="Dims")


@dataclass(frozen=True)
class Degree:
    """A degree of parallelism."""

    text: str  #: What it counts, for readers of a record.
    letter: str  #: Its abbreviation in the label of a run, as in ``s2 t4``.
    dimension: str  #: Its dimension of the mesh, as PyTorch calls it.
    #: What its ranks split: the ``samples`` of the global batch, the ``positions`` of a sample, the
    #: ``layers`` of the model, or their ``products``; ``weights``: FSDP shards weights over them.
    divides: tuple[str, ...] = ()
    #: Its place in the mesh, from the dimension whose neighbors may be farthest apart to the one with the most
    #: communication.
    place: int | None = None
    derived: int | None = None  #: Its place in the order in which ``auto`` degrees are derived.
    preset: str = ""  #: What to type to select it.
    options: tuple[str, ...] = ()  #: Options that have an effect only where the degree is not 1.
    #: Degrees of neighboring places whose ranks it regroups: it is not a factor of the number of ranks, but divides
    #: the product of these degrees.
    regroups: tuple[str, ...] = ()


def degree(text: str, letter: str, dimension: str, **columns: Any) -> Any:
    """Return a row of the table: a field with default 1; see :class:`Degree`."""
    return field(default=1, metadata={"row": Degree(text, letter, dimension, **columns)})


@dataclass(frozen=True)
class Degrees(Generic[T]):
    """The table of degrees, and a value for each of them."""

    replicate: T = degree(
        "Replicas of the model.", "r", "dp_replicate", divides=("samples",), place=0, derived=3,
        preset="parallel=ddp,pdp",
        options=("bucket_mb", "static_graph", "optimizer"),
    )  # fmt: skip
    shard: T = degree(
        "Ranks that shard the weights of one replica, and split its share of the batch.", "s", "dp_shard",
        divides=("samples", "weights"), place=2, derived=2, preset="parallel=fsdp,hsdp",
        options=("reshard_after_forward", "reduce_scatter_each_microbatch", "prefetch"),
    )  # fmt: skip
    context: T = degree(
        "Ranks that split each sequence.", "c", "cp", divides=("positions", "weights"), place=3,
        preset="parallel=cp", options=("context_method",),
    )  # fmt: skip
    tensor: T = degree(
        "Ranks that split each matrix product.", "t", "tp", divides=("products",), place=4, derived=1,
        preset="parallel=tp,3d", options=("sequence",),
    )  # fmt: skip
    # Stages are inside replicas, so that activations stay within a node.
    pipeline: T = degree(
        "Ranks that share the layers of a replica.", "p", "pp", divides=("layers",), place=1, derived=0,
        preset="parallel=pdp", options=("schedule", "stages_per_rank", "microbatches"),
    )  # fmt: skip
    expert: T = degree(
        "Ranks that share the experts of a layer.", "e", "ep", preset="parallel=ep",
        regroups=("shard", "context", "tensor"),
    )  # fmt: skip

    @classmethod
    def rows(cls) -> dict[str, Degree]:
        """Return the degrees by name."""
        return {row.name: row.metadata["row"] for row in fields(cls) if "row" in row.metadata}

    @classmethod
    def order(cls, *divides: str) -> tuple[str, ...]:
        """Return the dimensions of the mesh, outermost first; with arguments, only those that split any of these."""
        places = {
            name: row.place
            for name, row in cls.rows().items()
            if row.place is not None and (not divides or {*divides} & {*row.divides})
        }
        return tuple(sorted(places, key=lambda name: places[name]))

    @classmethod
    def copied(cls) -> tuple[str, ...]:
        """Return the dimensions along which weights are replicated, whether or not others shard them."""
        return tuple(name for name in cls.order("samples", "positions") if name not in cls.order("weights"))

    def degrees(self) -> dict[str, T]:
        """Return the value for each degree."""
        return {name: getattr(self, name) for name in self.rows()}


@dataclass(frozen=True)
class Dims(Degrees[int]):
    """The degrees of a run, which multiply to the world size."""

    def ways(self, *divides: str) -> int:
        """Return the number of ranks that share any of ``divides``; without arguments, of all ranks."""
        return math.prod(getattr(self, name) for name in self.order(*divides))

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.ways()

    @property
    def batch(self) -> int:
        """Number of shares of the global batch."""
        return self.ways("samples")

    @property
    def shards(self) -> int:
        """Number of ranks over which weights are sharded, if they are."""
        return self.ways("weights")

    @property
    def copies(self) -> int:
        """Number of replicas of the model, sharded or not."""
        return math.prod(getattr(self, name) for name in self.copied())

    def of_mesh(self, *wanted: str) -> tuple[str, ...]:
        """Return the dimensions of the mesh of ranks; or of those ``wanted``, the ones to flatten into one dimension.

        A dimension of size 1 is omitted, as flattening it makes another communicator of the same ranks. Only positions
        get their own, as their messages must not wait for the weights'.
        """
        # One of the two dimensions of the batch always exists, even with a single rank. FSDP keeps replicas of
        # DTensors equal, and needs a shard dimension, even of size one.
        always = {"replicate"} if self.batch == 1 else set()
        if self.expert > 1 or (self.tensor > 1 and self.copies * self.context > 1):
            always.add("shard")
        above_1 = {name for name in self.order() if getattr(self, name) > 1}
        exist = tuple(name for name in wanted or self.order() if name in above_1 | always)
        divided = tuple(name for name in exist if name in above_1)
        return exist if not wanted or divided == self.order("positions") else divided or exist[:1]

    @property
    def communicators(self) -> int:
        """Number of NCCL communicators of a rank: one of all ranks, one per smaller group, and two between stages.

        The mesh groups ranks by each degree above 1, and by the dimensions that it flattens into one. A degree that
        regroups others has two more groups: the ranks that share, and the ranks with the same share.
        """
        folds = {name: row.regroups for name, row in self.rows().items() if row.regroups and getattr(self, name) > 1}
        flattened = [self.order("samples"), self.order("samples", "positions"), self.order("weights"), self.copied()]
        groups = {self.of_mesh(*names) for names in (*flattened, *folds.values())} | {(name,) for name in self.order()}
        sizes = [math.prod(getattr(self, name) for name in group) for group in groups]
        sizes += [size for name in folds for size in (getattr(self, name), self.regroup_copies(name))]
        count = int(self.world_size > 1)
        return count + sum(1 < size < self.world_size for size in sizes) + 2 * (self.pipeline > 1)

    def regroup_copies(self, name: str) -> int:
        """Return the number of ranks with the same share under a degree that regroups others."""
        return math.prod(getattr(self, other) for other in self.rows()[name].regroups) // int(getattr(self, name))

    def stage(self, rank: int) -> int:
        """Return the position of a rank in its pipeline, by the order of the mesh."""
        order = self.order()
        inside = math.prod(getattr(self, name) for name in order[order.index("pipeline") + 1 :])
        return rank // inside % self.pipeline


def derive(
    world_size: int,
    wanted: Mapping[str, Size],
    kind: type[D] = Dims,  # type: ignore[assignment]
    units: Mapping[str, int] = {},
) -> D:
    """Derive the degrees of a run.

    ``auto`` degrees are derived in the order pipeline, tensor, shard, replicate: each is the smallest divisor above 1
    of the remaining factor, and the last takes the rest. A degree that regroups others is the greatest common divisor
    of their product and its units.

    Args:
        world_size: Total number of ranks.
        wanted: Each degree, or ``auto``.
        kind: The table.
        units: For each degree that regroups others, the number of units that its ranks share, such as experts.

    Raises:
        ConfigError: The degrees do not multiply to the world size, or a degree that regroups others does not divide
            their product; it states the equation and values that fit.
    """
    rows = kind.rows()
    factors = {name: wanted[name] for name in rows if not rows[name].regroups}
    sizes = {name: size for name, size in factors.items() if isinstance(size, int)}
    derived = auto_degrees(wanted, kind)
    rest, odd = divmod(world_size, math.prod(sizes.values()))
    if odd or (rest != 1 and not derived):
        require(_unequal(world_size, factors))
    for name in derived:
        is_last = name == derived[-1]
        sizes[name] = rest if is_last or rest == 1 else divisors(rest)[1]
        rest //= sizes[name]
    dims = kind(**sizes)
    folds = {name: [getattr(dims, other) for other in row.regroups] for name, row in rows.items() if row.regroups}
    for name, fold in folds.items():
        size = wanted.get(name, 1)
        sizes[name] = math.gcd(math.prod(fold), units.get(name, 0)) if not isinstance(size, int) else size
        require(_unfit(name, sizes[name], rows[name], fold))
    return kind(**sizes)


def auto_degrees(wanted: Mapping[str, Size], kind: type[Degrees[Any]] = Degrees) -> list[str]:
    """Return the degrees to derive from the number of ranks, in order."""
    order = {name: row.derived for name, row in kind.rows().items() if row.derived is not None}
    return sorted((name for name in order if not isinstance(wanted[name], int)), key=lambda name: order[name])


def sizes_by_node(name: str, world_size: int, wanted: Mapping[str, Size], nodes: int) -> list[int]:
    """Return what a degree of ``node`` may be, the first that suits the model counts.

    One replica per node, or two on a single node; of other degrees, the ranks of a node that the typed degrees leave,
    and the divisors of their number. Without a degree of ``auto`` it takes all ranks that they leave.
    """
    if name == "replicate":
        return [max(nodes, 2)]
    rest = world_size // math.prod(size for size in wanted.values() if isinstance(size, int)) or 1
    if "auto" not in {wanted[other] for other in Dims.order()}:
        return [rest]
    return divisors(math.gcd(rest, world_size // nodes))[:0:-1] or [1]


def _unfit(name: str, size: int, row: Degree, fold: list[int]) -> Problem | None:
    fits = divisors(math.prod(fold))
    if size in fits:
        return None
    factors = " x ".join(f"{other}({of_other})" for other, of_other in zip(row.regroups, fold, strict=True))
    return Problem(name, size, f"must divide {factors} = {fits[-1]}, the ranks that it regroups", try_these(fits))


def _unequal(world_size: int, wanted: Mapping[str, Size]) -> Problem:
    """Return the violated equation as a problem of a degree that can be changed, with values that fit."""
    product = math.prod(degree for degree in wanted.values() if isinstance(degree, int))
    factors = " x ".join(f"{name}({degree})" for name, degree in wanted.items() if degree != 1)
    relation = factors if "auto" in wanted.values() else f"{factors} = {product}"
    rule = f"{relation} must equal the number of ranks, {world_size}"
    requested = [name for name, degree in wanted.items() if degree not in (1, "auto")]
    if not requested:
        rule = f"all degrees of parallelism are 1, but there are {world_size} ranks"
        return Problem("replicate", 1, rule, try_these([world_size, "auto", "or cluster.ranks_per_node=1"]))
    fits = {name: _fitting(world_size, wanted, name) for name in requested}
    name = next((name for name in reversed(requested) if fits[name]), requested[-1])
    remedy = try_these(fits[name]) or try_these([f"{product} ranks", "or auto for one of the degrees"])
    return Problem(name, wanted[name], rule, remedy)


def _fitting(world_size: int, wanted: Mapping[str, Size], name: str) -> list[int]:
    """Return the values above 1 of one degree that fit the others."""
    others = math.prod(degree for other, degree in wanted.items() if isinstance(degree, int) and other != name)
    rest, odd = divmod(world_size, others)
    if odd or rest == 1:
        return []
    return divisors(rest)[1:] if "auto" in wanted.values() else [rest]


@dataclass(frozen=True)
class BatchPlan:
    """A factorization of ranks and batch.

    ``dims.batch * accumulation * microbatches * micro_batch`` is the global batch.
    """

    dims: Dims  #: The degrees of parallelism.
    global_batch: int  #: Samples of one optimizer step over all ranks.
    micro_batch: int  #: Samples of one forward and backward pass through one stage.
    microbatches: int = 1  #: Micro-batches of one pass of a pipeline schedule; 1 without a pipeline.
    accumulation: int = 1  #: Passes whose gradients are accumulated before the optimizer step.

    @property
    def replicas(self) -> int:
        """Number of equal shares of the global batch."""
        return self.dims.batch

    @property
    def replica_batch(self) -> int:
        """Samples of one step on one replica."""
        return self.global_batch // self.replicas

    def rows(self, step: int, replica: int) -> tuple[int, int]:
        """Return a replica's range of samples at a step, ``(start, stop)``, numbered over the whole run."""
        start = step * self.global_batch + replica * self.replica_batch
        return start, start + self.replica_batch

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as stored in a record; ``data`` is the number of replicas."""
        numbers = asdict(self)
        return {"data": self.replicas, **numbers.pop("dims"), **numbers}

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> "BatchPlan":
        """Return the plan that :meth:`as_dict` wrote; a degree that is not among the fields is 1."""
        dims = Dims(**{name: written.get(name) or 1 for name in Dims.rows()})
        return cls(dims, **{field.name: written[field.name] for field in fields(cls) if field.name != "dims"})


def check_share(replicas: int, global_batch: int, micro_batch: int | Literal["auto"]) -> None:
    """Raise ConfigError if a batch cannot be split over replicas in such micro-batches."""
    if global_batch < 1 or global_batch % replicas:
        below = global_batch // replicas * replicas
        close = [number for number in (below, below + replicas) if number > 0]
        rule = f"must be a multiple of the number of data-parallel replicas, {replicas}"
        require(Problem("global_batch", global_batch, rule, try_these(close)))
    if micro_batch != "auto":
        share = global_batch // replicas
        require(divides("micro_batch", micro_batch, share, f"a replica's share of the batch, {share}"))
