"""The description of itself that every rank shares with the others after the rendezvous."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ptdbench.launch import cgroups, settings
from ptdbench.launch.collect import gather
from ptdbench.launch.world import Peer, World


def bind_to_share(world: World, cores_per_rank: Any) -> None:
    """Bind this rank to its share of the node's cores; called in all ranks, and before :func:`gather_peers`.

    ``cores_per_rank`` is a number, or ``auto`` for an equal share.
    """
    identity = node(os.environ), machine()  # several virtual machines may be called localhost
    of_all: list[tuple[tuple[str, str], settings.Cores]] = gather((identity, settings.own_cores()))
    neighbors = [rank for rank, (machine, _) in enumerate(of_all) if machine == identity]
    of_neighbors, place = [of_all[rank][1] for rank in neighbors], neighbors.index(world.rank)
    settings.bind_cores(*settings.share_cores(of_neighbors, place, cores_per_rank, cgroups.cpus()))


def gather_peers(world: World, device: torch.device) -> list[Peer]:
    """Return the description of every rank, in order; called in all ranks."""
    return gather(
        Peer(
            rank=world.rank,
            local_rank=world.local_rank,
            local_size=world.local_size,
            node=node(os.environ),
            host=socket.gethostname(),
            device=f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
            cores=sorted(settings.own_cores()),
            threads=torch.get_num_threads(),
            settings=settings.recorded(os.environ),
        )
    )


def node(environ: Mapping[str, str]) -> str:
    """Return the cluster's name for this node, or else the host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def machine() -> str:
    """Return an identifier of this machine, the same in all its containers: several hosts may be named localhost."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()
