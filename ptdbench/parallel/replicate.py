"""DistributedDataParallel: a copy of a module on every rank, gradients averaged during the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ptdbench.parallel.engine import Part


@dataclass(frozen=True)
class Replication:
    """How gradients are averaged.

    Attributes:
        bucket_mb: Size of the all-reduce buckets in MiB: smaller ones start earlier, larger ones use the links better.
        as_bucket_view: Let ``.grad`` point into the buckets, which saves one copy of all gradients.
        static_graph: Tell DDP that every step uses the same parameters in the same order.
    """

    bucket_mb: float
    as_bucket_view: bool
    static_graph: bool


def replicate(module: nn.Module, mesh: DeviceMesh, device: torch.device, how: Replication) -> Part:
    """Wrap a module that has its weights: DDP verifies their shapes between replicas, and groups them into buckets.

    The first forward pass after one backward pass, under ``static_graph`` after two, rebuilds the buckets once in the
    order of the gradients. The position of a number in its bucket determines the order in which three or more ranks
    add theirs, and so the rounding of the sum.
    """
    replica = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        bucket_cap_mb=how.bucket_mb,
        gradient_as_bucket_view=how.as_bucket_view,
        static_graph=how.static_graph,
    )
    return Part(module, replica, replica.no_sync, settles_after=2 if how.static_graph else 1)
