"""Layouts, links and failures under a launcher, with the command lines of a user."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cells import Matrix
from benchmarks.gpu_check.session import CHECKED_STEPS, Session
from benchmarks.script import ROOT, TORCHRUN, TRAIN
from ptdbench.parallel.pipeline_schedules import SCHEDULES
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason

from . import processes

#: Largest relative difference of a loss from that of the reference.
TOLERANCE = 1e-4

#: Seconds after a failure in which every process of the run must end, and the timeout of a command.
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
        """The override of the number of ranks: ptdbench starts only local ones itself."""
        return (f"cluster.ranks_per_node={self.ranks}",) if self.name == "local" else ("cluster.ranks_per_node=auto",)


def launchers(names: Sequence[str], ranks: int) -> list[Launcher]:
    """Return the available ones of ``names``, with ``ranks`` on each node; srun and mpirun use a whole allocation."""
    nodes, python = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), sys.executable
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    srun = ("srun", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", python)
    # Open MPI would bind a rank to one core, and counts cores, not GPUs.
    mpirun = ("mpirun", *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks * nodes), "--map-by")
    launchers = (
        Launcher("local", (python,), ranks),
        Launcher("torchrun", (*TORCHRUN, f"--nproc_per_node={ranks}"), ranks),
        Launcher("srun", srun, ranks * nodes, nodes),
        Launcher("mpirun", (*mpirun, f"ppr:{ranks}:node", python), ranks * nodes, nodes),
    )
    is_here = {launcher.name: bool(shutil.which(launcher.prefix[0])) for launcher in launchers}
    is_here["srun"] &= "SLURM_JOB_ID" in os.environ
    if skipped := [name for name in names if not is_here[name]]:
        print(f"skipped, not available (srun needs an allocation): {', '.join(skipped)}")
    return [launcher for launcher in launchers if launcher.name in names and is_here[launcher.name]]


#: Layouts that must follow ``single``, each with the fewest ranks that it needs; torch may lack a schedule.
LAYOUTS = [
    (ranks, layout)
    for ranks, layout in Matrix.load("cluster").rows.values()
    if SCHEDULES.get(layout.partition("parallel.schedule=")[2], SCHEDULES["1f1b"]).is_supported
]


def layouts(session: Session, launcher: Launcher, layouts: Sequence[tuple[int, str]], model: str, batch: int) -> None:
    """Compare the losses of each layout with those of one rank.

    Args:
        session: Where the runs leave their records.
        launcher: Starts the ranks.
        layouts: The fewest ranks and the overrides of each.
        model: What the layouts train.
        batch: Samples of a step for each rank.
    """
    training = (
        f"model={model}", f"train.global_batch={batch * launcher.ranks}", f"train.steps={CHECKED_STEPS}",
        "optimizer=sgd", "optimizer.lr=0.01",
    )  # fmt: skip
    alone = replace(session, launcher=TRAIN[:1])
    reference = alone.reference(f"{launcher.name} single", *training, "parallel=single", f"train.micro_batch={batch}")
    for ranks, layout in layouts:
        if ranks <= launcher.ranks:
            name = f"{launcher.name} {layout.replace('parallel', '', 1).lstrip('=')}"
            session.follows(name, reference, TOLERANCE, *launcher.words, *training, *layout.split())


def workload(session: Session, launcher: Launcher, name: str) -> None:
    """Check that a workload that measures the links succeeds."""
    if session.well(f"{launcher.name} {name}", f"workload={name}", *launcher.words):
        session.report(f"{launcher.name} {name}", True, "ok")


def fault(session: Session, launcher: Launcher, how: str) -> None:
    """Check that after a failure of one rank all processes end in time, and the record names that rank."""
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
    text = f"{gone} {seconds:.0f} s after, at most {GONE:.0f}; {why}"
    session.report(f"{launcher.name} {how}", seconds <= GONE and is_named and record.get("status") != "ok", text)
