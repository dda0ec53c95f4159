"""Batch plan: how a global batch is split over ranks, and the rules for doing so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ptdbench.parallel.dims import Dims
from ptdbench.problems import Problem, divides, require, try_these


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
    def of(cls, written: Mapping[str, Any]) -> BatchPlan:
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
