"""What every rank tells the others about itself, once they can talk."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.launch import cores, settings
from ptdbench.launch.world import World


@dataclass(frozen=True)
class Peer:
    """One rank, as it sees itself.

    Attributes:
        rank: Its number among all ranks.
        local_rank: Its number among those of its node.
        local_size: How many ranks its node has.
        node: The node as the cluster names it.
        host: The machine's own name; it differs where several nodes live on one machine.
        device: ``cpu``, or the GPU with its name.
        cores: The cores it may run on.
        threads: How many threads it uses.
        settings: The variables that change results or speed.
    """

    rank: int
    local_rank: int
    local_size: int
    node: str
    host: str
    device: str
    cores: list[int]
    threads: int
    settings: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def meet(world: World, device: torch.device, wanted: Any) -> list[Peer]:
    """Tell the others who this is, and learn who they are; binds this rank to its share of the node's cores.

    Args:
        world: This rank's place.
        device: This rank's device.
        wanted: Cores of a rank, ``cluster.cpus_per_rank``.

    Returns:
        Every rank, in order.
    """
    on_node: list[tuple[str, cores.Cores]] = gather((node(os.environ), cores.mine()))
    neighbors = [rank for rank, (name, _) in enumerate(on_node) if name == on_node[world.rank][0]]
    cores.bind(*cores.share([on_node[rank][1] for rank in neighbors], neighbors.index(world.rank), wanted))
    return gather(_self(world, device))


def node(environ: Mapping[str, str]) -> str:
    """What the cluster calls this node, else the machine's name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _self(world: World, device: torch.device) -> Peer:
    name = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
    return Peer(
        rank=world.rank,
        local_rank=world.local_rank,
        local_size=world.local_size,
        node=node(os.environ),
        host=socket.gethostname(),
        device=name,
        cores=sorted(cores.mine()),
        threads=torch.get_num_threads(),
        settings=settings.here(),
    )


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, by rank; called in all ranks of ``group``, or in all there are."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
