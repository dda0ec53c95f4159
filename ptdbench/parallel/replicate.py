"""DistributedDataParallel: a copy of a module on every rank, gradients averaged while the backward pass goes on."""

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
        bucket_mb: They are all-reduced in buckets of this many MiB: smaller ones start earlier, larger ones use the
            links better.
        as_bucket_view: Let ``.grad`` point into the buckets, which saves one copy of all gradients.
        static_graph: Tell DDP that every step uses the same parameters in the same order.
    """

    bucket_mb: float
    as_bucket_view: bool
    static_graph: bool


def replicate(module: nn.Module, mesh: DeviceMesh, device: torch.device, how: Replication) -> Part:
    """Wrap a module that has its weights: DDP compares them between the replicas, and groups them into buckets.

    The next forward pass after DDP has watched a backward pass, under ``static_graph`` a second one, rebuilds the
    buckets in the order in which gradients came, once and for all. Where a number lies in its bucket decides in which
    order three or more ranks add theirs, and so how the sum is rounded.
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
