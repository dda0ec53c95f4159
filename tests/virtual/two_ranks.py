"""torch on two virtual GPUs, one rank each: ``python -m tests.virtual.two_ranks RANK``.

They meet over the file that ``MEETING`` names, and print answers as JSON.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ptdbench.checkpoints.saver import Saver
from ptdbench.launch import rendezvous


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
    answers = {ask.__name__: ask(rank) for ask in (patience, saving)}
    dist.destroy_process_group()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(os.environ["MEETING"]))
