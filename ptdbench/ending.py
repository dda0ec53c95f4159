"""How a run ends: who writes what into its record, and who ends the ranks that nothing else would end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ptdbench import config, plan
from ptdbench.launch import local, slurm
from ptdbench.launch.peers import Peer
from ptdbench.launch.slurm import SlurmError
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import World
from ptdbench.measure.hardware import environment
from ptdbench.records import failure, record, store, tensorboard
from ptdbench.records.figures import write_figures
from ptdbench.terminal import say
from ptdbench.workloads.job import Outcome

#: Seconds that a rank which only lost its peers stays, so that who watches the ranks sees the culprit die first.
LINGER = 2.0


def close(directory: Path, planned: plan.Plan, device: torch.device, met: Sequence[Peer], outcome: Outcome) -> None:
    """Write what came of the run: the record, and from it what TensorBoard shows."""
    done = store.load_record(directory) | {
        "status": "ok",
        "error": None,
        "environment": environment(device.type),
        "nodes": list(dict.fromkeys(peer.node for peer in met)),
        **outcome.fields,
    }
    if outcome.error:
        done = record.failed(done, failure.describe(outcome.error, rank=0))
    elif outcome.stopped:
        done = record.stopped(done, outcome.stopped)
    store.write_record(directory, done)
    if done["losses"]:
        tensorboard.write_tensorboard(directory, done, outcome.shown)
    write_figures(directory, outcome.figures)
    if outcome.stopped:
        _requeue(directory, planned.config.cluster, done, outcome.stopped)


def _requeue(directory: Path, cluster: config.Cluster, done: Mapping[str, Any], stopped: str) -> None:
    """Let SLURM start the job of a run that has saved once more, if it may; the run's record then stays open.

    Only for the signal that SLURM sends ahead of a time limit: with SIGTERM a person cancels a job, and SLURM requeues
    by itself what it preempts.
    """
    if not (isinstance(cluster, config.Slurm) and cluster.requeue and stopped.startswith("SIGUSR2")):
        return
    restarts = slurm.restarts(os.environ)
    if restarts >= cluster.max_requeues:
        limit = f"{stopped}; not requeued: cluster.max_requeues={cluster.max_requeues} is reached"
        store.write_record(directory, record.stopped(done, limit))
        return
    # Before it is requeued: SLURM leaves no time after.
    store.write_record(directory, record.requeued(done, restarts + 1, cluster.max_requeues))
    try:
        slurm.requeue(os.environ)
    except SlurmError as error:
        store.write_record(directory, record.stopped(done, f"{stopped}; it could not be requeued: {error}"))


def report(world: World, directory: Path, error: BaseException) -> None:
    """Leave this rank's account of its failure; where nobody watches over the ranks, draw the conclusion too."""
    local.ignore_signals()  # the launcher sends them to all ranks as soon as it sees that one has failed
    told = failure.describe(error, world.rank)
    with suppress(OSError):  # a disk that is full takes no report either
        failure.write_failure(directory, told)
    cause = failure.root_cause(failure.read_failures(directory) or [told], world.size)
    if cause.rank != world.rank:
        time.sleep(LINGER)
        cause = failure.root_cause(failure.read_failures(directory) or [told], world.size)
    with suppress(OSError, store.Damaged):  # rank 0 may have died before it could open the record
        written = store.load_record(directory)
        if not record.is_settled(written):
            store.write_record(directory, record.failed(written, cause))
    if world.launcher != "local" and cause.rank == world.rank:
        say(f"rank {world.rank}: {told.traceback}", sys.stderr)  # rank 0 may not come to tell it
    if world.launcher == "srun" and cause.rank == world.rank:
        slurm.end_step(os.environ, after=5 * LINGER)  # for those whom the loss of a peer does not wake up


def watchdog(read: config.Config, world: World, own_store: dist.Store, directory: Path) -> Watchdog:
    """Ends the run where a rank is stuck, and writes down which."""

    def tell(rank: int, message: str, stacks: str) -> None:
        with suppress(OSError):
            failure.write_failure(directory, failure.stuck(rank, message, stacks))
            cause = failure.root_cause(failure.read_failures(directory), world.size)
            store.write_record(directory, record.failed(store.load_record(directory), cause))

    minutes = read.general.timeout_minutes
    return Watchdog(world, own_store, directory, math.inf if minutes is None else 60 * minutes, tell)
