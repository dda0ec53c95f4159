"""The ways to start ranks that are at hand, as command lines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

LAUNCHERS = ("local", "torchrun", "srun", "mpirun")


@dataclass(frozen=True)
class Launcher:
    """How ranks are started."""

    name: str  #: One of :data:`LAUNCHERS`.
    prefix: tuple[str, ...]  #: The words before ``train.py``.
    ranks: int  #: How many ranks there are.
    nodes: int = 1  #: How many nodes they are on.
    options: tuple[str, ...] = ()  #: Overrides that it needs.


def local(ranks: int) -> Launcher:
    """Ranks that ptdbench starts itself, on this node."""
    return Launcher("local", (sys.executable,), ranks, options=(f"cluster.ranks_per_node={ranks}",))


def launchers(names: Sequence[str], ranks: int) -> list[Launcher]:
    """Those of ``names`` that are here, with ``ranks`` on each node; srun and mpirun use the nodes of an allocation."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    every, python = ranks * nodes, sys.executable
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    srun = ("srun", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", python)
    # Open MPI would bind a rank to one core, and counts cores, not GPUs.
    mpirun = ("mpirun", *root, "--oversubscribe", "--bind-to", "none", "-np", str(every), "--map-by")
    known = [
        local(ranks),
        Launcher("torchrun", torchrun, ranks),
        Launcher("srun", srun, every, nodes),
        Launcher("mpirun", (*mpirun, f"ppr:{ranks}:node", python), every, nodes),
    ]
    here = [one for one in known if one.name in names and (shutil.which(one.prefix[0]) or one.prefix[0] == python)]
    if "SLURM_JOB_ID" not in os.environ:
        here = [one for one in here if one.name != "srun"]
    if left_out := [name for name in names if name not in [one.name for one in here]]:
        print(f"left out, as they are not here (srun needs an allocation): {', '.join(left_out)}")
    return here
