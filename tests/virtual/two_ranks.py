"""torch on two virtual GPUs, one rank each: ``python -m tests.virtual.two_ranks RANK``.

They meet over the file that ``MEETING`` names, and print answers as JSON.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ptdbench.checkpoints.saver import Saver
from ptdbench.launch import rendezvous


def objects(rank: int) -> dict[str, Any]:
    """Objects of all ranks, and one sent from the first."""
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (100 * rank)})
    sent = [["of rank 0"] if rank == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    received: list[Any] = ["for rank 1"] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(received, dst=1)
    else:
        dist.recv_object_list(received, src=0)
    return {"gathered": [len(one["text"]) for one in gathered], "sent": sent, "received": received}


def patience(rank: int) -> list[float]:
    """Minutes that a group waits: one of a mesh as torch makes it, the default one and that of the mesh afterwards."""
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("one", "both"))["one"].get_group()

    def minutes(group: dist.ProcessGroup | None) -> float:
        chosen = group or dist.distributed_c10d._get_default_group()
        return chosen._get_backend(torch.device("cuda")).options._timeout.total_seconds() / 60  # type: ignore[attr-defined]

    found = [minutes(mesh)]
    rendezvous.be_patient(rendezvous.patience_for(20))
    return [*found, minutes(None), minutes(mesh)]


def saving(rank: int) -> int:
    """The device of the thread that saves."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), keep=1)
        saver._begin(lambda: found.append(torch.cuda.current_device()))
        saver.close()
    return found[0]


def main(rank: int, meeting: Path) -> None:
    """Meet the other rank over a file, and ask."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=meeting.as_uri(), rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    answers = {ask.__name__: ask(rank) for ask in (objects, patience, saving)}
    dist.destroy_process_group()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(os.environ["MEETING"]))
