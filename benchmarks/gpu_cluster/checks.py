"""Layouts, links and failures under a launcher: commands as a person types them, and the verdict on each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.gpu_check.session import CHECKED_STEPS, Session
from benchmarks.script import ROOT, TORCHRUN, TRAIN
from ptdbench.parallel.pipeline_schedules import SCHEDULES
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason

from . import processes

#: Largest relative difference of a loss from that of the reference.
TOLERANCE = 1e-4

#: Seconds after a failure in which every process of the run must end, and after which a command is not waited for.
GONE, PATIENCE = 40.0, 600.0

LAUNCHERS = ("local", "torchrun", "srun", "mpirun")
WORKLOADS = ("p2p", "collectives")
FAULTS = ("kill", "stop", "raise")


@dataclass(frozen=True)
class Launcher:
    """How ranks are started."""

    name: str  #: One of :data:`LAUNCHERS`.
    prefix: tuple[str, ...]  #: The words before ``train.py``.
    ranks: int  #: How many ranks there are.
    nodes: int = 1  #: How many nodes they are on.

    @property
    def words(self) -> tuple[str, ...]:
        """The override by which ptdbench starts the ranks itself."""
        return (f"cluster.ranks_per_node={self.ranks}",) if self.name == "local" else ("cluster.ranks_per_node=auto",)


def launchers(names: Sequence[str], ranks: int) -> list[Launcher]:
    """Those of ``names`` that are here, with ``ranks`` on each node; srun and mpirun use the nodes of an allocation."""
    nodes, python = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), sys.executable
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    srun = ("srun", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", python)
    # Open MPI would bind a rank to one core, and counts cores, not GPUs.
    mpirun = ("mpirun", *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks * nodes), "--map-by")
    every = (
        Launcher("local", (python,), ranks),
        Launcher("torchrun", (*TORCHRUN, f"--nproc_per_node={ranks}"), ranks),
        Launcher("srun", srun, ranks * nodes, nodes),
        Launcher("mpirun", (*mpirun, f"ppr:{ranks}:node", python), ranks * nodes, nodes),
    )
    is_here = {one.name: bool(shutil.which(one.prefix[0])) for one in every}
    is_here["srun"] &= "SLURM_JOB_ID" in os.environ
    if left_out := [name for name in names if not is_here[name]]:
        print(f"left out, as they are not here (srun needs an allocation): {', '.join(left_out)}")
    return [one for one in every if one.name in names and is_here[one.name]]


@dataclass(frozen=True)
class Layout:
    """A layout that must follow ``single``."""

    words: str  #: Its overrides, as they are typed.
    ranks: int = 2  #: The fewest that it needs.


#: Schedules beside the default one that this torch carries out: stages in turns and in the form of a V, whose messages
#: may wait for each other where one communicator has them all.
SCHEDULES_TO_TRY = [name for name in ("gpipe", "interleaved1f1b", "zbv", "dualpipev") if SCHEDULES[name].is_supported]

LAYOUTS = (
    *(Layout(f"parallel={name}") for name in ("ddp", "fsdp", "pdp", "tp")),
    Layout("parallel=hsdp", ranks=4),
    Layout("parallel=3d", ranks=8),
    *(
        Layout(f"parallel={name} parallel.context=2 parallel.context_method={method}")
        for name, method in product(("ddp", "fsdp"), ("ulysses", "ring"))
    ),
    *(Layout(f"parallel=pdp parallel.pipeline=2 parallel.schedule={name}") for name in SCHEDULES_TO_TRY),
    Layout("parallel=ddp parallel.optimizer=zero1"),
)


def layouts(session: Session, launcher: Launcher, every: Sequence[Layout], model: str, batch: int) -> None:
    """Hold the losses of each layout against those of one rank.

    Args:
        session: Where the runs leave their records.
        launcher: How they are started.
        every: What is tried, where there are enough ranks.
        model: What the layouts train.
        batch: Samples of a step for each rank.
    """
    training = (
        f"model={model}", f"train.global_batch={batch * launcher.ranks}", f"train.steps={CHECKED_STEPS}",
        "optimizer=sgd", "optimizer.lr=0.01",
    )  # fmt: skip
    alone = replace(session, launcher=TRAIN[:1])
    reference = alone.reference(f"{launcher.name} single", *training, "parallel=single", f"train.micro_batch={batch}")
    for layout in every:
        if layout.ranks <= launcher.ranks:
            words = (*launcher.words, *training, *layout.words.split())
            name = f"{launcher.name} {layout.words.replace('parallel', '', 1).lstrip('=')}"
            session.follows(name, reference, TOLERANCE, *words)


def workload(session: Session, launcher: Launcher, name: str) -> None:
    """See that a workload that measures the links comes to an end, and well."""
    if session.well(f"{launcher.name} {name}", f"workload={name}", *launcher.words):
        session.tell(f"{launcher.name} {name}", True, "ok")


def fault(session: Session, launcher: Launcher, how: str) -> None:
    """See that when one rank breaks all processes end in time, and the record names that rank."""
    folder, victim, mark = session.directory / f"{launcher.name}-{how}", launcher.ranks - 1, uuid.uuid4().hex
    folder.mkdir(parents=True)
    begun, path = folder / "begun", folder / "run" / "record.json"
    overrides = (
        "model=custom", "model._target_=benchmarks.gpu_cluster.victim.Victim", f"+model.how={how}",
        f"+model.rank={victim}", f"+model.begun={begun}", "data=synthetic_vectors", "data.inputs=8",
        "data.outputs=4", "parallel=ddp", "train.steps=1000000", "timeout_minutes=0.1", f"device={session.device}",
        f"hydra.run.dir={path.parent}",
    )  # fmt: skip
    with (folder / "output.txt").open("w") as output:
        command, environ = [*launcher.prefix, TRAIN[1], *launcher.words, *overrides], processes.environ(mark)
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
        seconds = processes.seconds_until_gone(begun, mark, launcher.nodes, process, PATIENCE)
    record = json.loads(path.read_text()) if path.exists() else {}
    error: dict[str, Any] = record.get("error") or {}
    is_named = error.get("rank") == victim or f"rank {victim}" in str(error.get("message"))
    gone = "all gone" if seconds <= GONE else "not gone"
    why = reason(typed(record)) if error else f"see {output.name}"
    said = f"{gone} {seconds:.0f} s after, at most {GONE:.0f}; {why}"
    session.tell(f"{launcher.name} {how}", seconds <= GONE and is_named and record.get("status") != "ok", said)
