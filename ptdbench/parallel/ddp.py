"""DistributedDataParallel: a full replica on every rank, gradients averaged while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch.nn.parallel import DistributedDataParallel

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel.engine import Accumulating, Engine, Setting
from ptdbench.parallel.layout import Layout, arrange
from ptdbench.parallel.precision import autocast_forward
from ptdbench.parallel.sync_batchnorm import synchronise_batchnorm
from ptdbench.problems import Problem, require


@dataclass(frozen=True)
class DDP:
    """Options of DistributedDataParallel.

    Attributes:
        bucket_mb: Gradients are all-reduced in buckets of this many MiB: smaller ones start earlier, larger
            ones use the links better.
        gradient_as_bucket_view: Let ``.grad`` point into the buckets, which saves one copy of all gradients.
        static_graph: Tell DDP that every step uses the same parameters in the same order. ``auto``: where it is sound,
            that is without accumulation (with it torch fails an internal assertion).
        sync_batchnorm: Normalise over the whole global batch instead of over each rank's share.
    """

    bucket_mb: float = 25
    gradient_as_bucket_view: bool = True
    static_graph: bool | Literal["auto"] = "auto"
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        require(bucket_problem(self.bucket_mb))

    def ranks(self, available: int) -> int:
        """How many of the available devices a run takes where its config does not say."""
        return available

    def layout(self, world_size: int, global_batch: int, micro_batch: int | Literal["auto"]) -> Layout:
        """Every rank is a replica; raises ConfigError where the batch does not divide."""
        found = arrange(world_size, global_batch, micro_batch)
        if self.static_graph is True and found.accumulation > 1:
            rule = f"is not sound with gradient accumulation, and there are {found.accumulation} passes a step"
            require(Problem("parallel.static_graph", "true", rule, "try auto, false, or train.micro_batch=auto"))
        return found

    def check(self, model: Model, where: Layout) -> None:
        """Every model will do."""

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Replicate the model over the mesh."""
        # Weights first: DDP compares the replicas' parameters when it is made, and groups them into buckets.
        module = module_of(model)
        setting.fill(model, module)
        setting.fit(module)
        group = setting.mesh["data"].get_group()
        if self.sync_batchnorm:
            synchronise_batchnorm(module, group, setting.device)
        # Inside DDP: its hooks must see the parameters' gradients, not the compiler's or a checkpoint's.
        setting.dress(model.layers())
        autocast_forward(module, setting.precision, setting.device.type)
        replica = DistributedDataParallel(
            module,
            device_ids=[setting.device] if setting.device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=setting.layout.accumulation == 1 if self.static_graph == "auto" else self.static_graph,
        )

        @contextmanager
        def bracket(last: bool) -> Iterator[None]:
            if last:
                yield
            else:
                with replica.no_sync():
                    yield

        return Accumulating(replica, setting.layout.micro_batch, bracket, backwards_until_settled(replica))


def backwards_until_settled(replica: DistributedDataParallel) -> int:
    """Backward passes that DDP needs to learn in which order gradients come.

    The next forward pass rebuilds its buckets in that order, once and for all. DDP watches the first backward pass,
    under ``static_graph`` the second. Where a number lies in its bucket decides in which order three or more ranks add
    theirs, and so how the sum is rounded.
    """
    return 2 if replica.static_graph else 1


def bucket_problem(bucket_mb: float) -> Problem | None:
    """What is wrong with the size of a bucket, here and in a pipeline's replicas."""
    if bucket_mb > 0:
        return None
    return Problem("bucket_mb", bucket_mb, "must be greater than 0 (MiB)", "try 25")
