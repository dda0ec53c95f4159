"""What the ranks of a launch tell each other about themselves: the GPUs that they see, their cores, their settings.

They agree on the devices before anything else. A rank chooses its device by what torch finds on its node. With a broken
driver, torch finds no GPU: that rank would join its peers over gloo while they wait for it over NCCL. And if a launcher
starts more ranks than there are GPUs, some ranks have none.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, json

from ptdbench.launch import rendezvous, settings
from ptdbench.launch.collect import gather
from ptdbench.launch.world import Peer, World
from ptdbench.problems import Problem, first_line, require
from ptdbench.terminal import plural, rank_names


class VisibleGpus(Struct, frozen=True):
    """The GPUs that one rank sees."""

    rank: int  #: The rank.
    node: str  #: Its node.
    local_size: int  #: Number of ranks on its node.
    gpus: int  #: Number of GPUs that it sees.
    uuid: str = ""  #: The UUID of its GPU, if it sees only one of the node's; each rank may have been given its own.
    reason: str = ""  #: Why torch sees none.


def require_devices(world: World, device: str, backend: str) -> None:
    """Raise ConfigError, the same in every rank, if not all can have a device of the same kind.

    Ranks may share one GPU only with ``backend=gloo``: NCCL refuses two ranks on one GPU.
    """
    if device == "cpu" or world.size == 1 or world.started_by.has_parent:  # ranks of one parent share a machine
        return
    seen = _survey(world)
    require(_mixed(seen, device) or _too_many(seen, device, backend, world.launcher))


def select_gpu(world: World, device: str) -> None:
    """Make this rank's GPU the current one, if it sees several: a model's constructor may ask for ``cuda``."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus > 1 and world.local_rank < gpus:
        torch.cuda.set_device(world.local_rank)


def bind_to_share(world: World, cores_per_rank: Any) -> None:
    """Bind this rank to its share of the node's cores; called in all ranks, and before :func:`gather_peers`.

    ``cores_per_rank`` is a number, or ``auto`` for an equal share.
    """
    identity = node(os.environ), machine()  # several virtual machines may be called localhost
    of_all: list[tuple[tuple[str, str], settings.Cores]] = gather((identity, settings.own_cores()))
    neighbors = [rank for rank, (machine, _) in enumerate(of_all) if machine == identity]
    of_neighbors, place = [of_all[rank][1] for rank in neighbors], neighbors.index(world.rank)
    settings.bind_cores(*settings.share_cores(of_neighbors, place, cores_per_rank, settings.cpu_quota()))


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


@cache
def _survey(world: World) -> list[VisibleGpus]:
    store = dist.PrefixStore(f"devices {rendezvous.launch_name(world)}", rendezvous.store())
    store.set(str(world.rank), json.encode(_look(world)).decode())
    keys = [str(rank) for rank in range(world.size)]
    try:
        store.wait(keys, rendezvous.ARRIVAL)
    except dist.DistError:
        missing = [rank for rank in range(world.size) if not store.check([str(rank)])]
        rule = f"{rank_names(missing)} sent no list of devices within {rendezvous.ARRIVAL.seconds} s"
        problem = Problem(world.launcher, f"{world.size} ranks", rule, "see their own output")
        raise rendezvous.NotMet([problem]) from None
    return [json.decode(seen, type=VisibleGpus) for seen in store.multi_get(keys)]


def _look(world: World) -> VisibleGpus:
    gpus, uuid, reason = torch.cuda.device_count(), "", ""
    try:
        if gpus == 1 and world.local_size > 1:
            uuid = str(torch.cuda.get_device_properties(0).uuid)
        elif gpus == 0:
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        gpus, reason = 0, first_line(error).partition(". ")[0]
    return VisibleGpus(world.rank, node(os.environ), world.local_size, gpus, uuid, reason)


def _mixed(seen: Sequence[VisibleGpus], device: str) -> Problem | None:
    """Find a mix of ranks with and without GPUs, and name the minority."""
    sides = [[sight for sight in seen if sight.gpus], [sight for sight in seen if not sight.gpus]]
    if not all(sides):
        return None
    others, odd = sides if len(sides[0]) >= len(sides[1]) else reversed(sides)
    rule = f"{_finds(odd)}, and {_finds(others)}: all ranks must compute on the same kind of device"
    nodes = ", ".join(dict.fromkeys(sight.node for sight in seen if not sight.gpus))
    return Problem("device", device, rule, f"see why {nodes} has no GPU, exclude it, or try device=cpu")


def _finds(ranks: Sequence[VisibleGpus]) -> str:
    """Describe which ranks find what: ``rank 3 on n2 finds no GPU (Found no NVIDIA driver)``."""
    nodes = ", ".join(dict.fromkeys(sight.node for sight in ranks))
    counts = sorted({sight.gpus for sight in ranks})
    what = " or ".join(plural(count, "GPU") for count in counts) if counts[0] else "no GPU"
    reason = next((f" ({sight.reason})" for sight in ranks if sight.reason), "")
    verb = "finds" if len(ranks) == 1 else "find"
    return f"{rank_names([sight.rank for sight in ranks])} on {nodes} {verb} {what}{reason}"


def _too_many(seen: Sequence[VisibleGpus], device: str, backend: str, launcher: str) -> Problem | None:
    """Find a node with more ranks than GPUs, or whose ranks were given the same GPU."""
    for sight in seen:
        if 1 < sight.gpus < sight.local_size:
            rule = f"{launcher} started {sight.local_size} ranks on {sight.node}, and each sees {sight.gpus} GPUs there"
            remedy = f"start at most {sight.gpus} ranks a node, or try device=cpu"
            return Problem("device", device, f"{rule}: one rank, one GPU", remedy)
        same = [other.rank for other in seen if (other.node, other.uuid) == (sight.node, sight.uuid)]
        if sight.uuid and len(same) > 1 and backend != "gloo":
            rule = f"{rank_names(same)} on {sight.node} see only one GPU, and it is the same one"
            remedy = "start one rank a GPU, let each see its own or all of them, or try device=cpu"
            return Problem("device", device, f"{rule}: one rank, one GPU", remedy)
    return None
