"""The end of a run: which process writes what into its record, and which one ends ranks that would hang."""

import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from ptdbench.job import Outcome, Results
from ptdbench.launch import slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import Peer, World
from ptdbench.measure.hardware import environment
from ptdbench.planning import measured
from ptdbench.records import failure, ledger, record
from ptdbench.records.failure import is_stop, root_cause
from ptdbench.records.ownership import Attempt, slurm_job
from ptdbench.records.run_record import typed
from ptdbench.records.schema import Draft, Written
from ptdbench.records.store import Damaged
from ptdbench.setup import config, run_spec
from ptdbench.terminal import echo


def write_result(
    attempt: Attempt, spec: run_spec.RunSpec, device: torch.device, met: Sequence[Peer], outcome: Outcome
) -> None:
    """Write the result of the run: the record, and from it the summary for TensorBoard and logging services."""
    is_on_gpus = device.type == "cuda" and not spec.virtual

    def finish(written: Draft) -> Written:
        done = written | {
            "status": "ok",
            "error": None,
            "environment": environment(device.type),
            "nodes": list(dict.fromkeys(peer.node for peer in met)),
            **outcome.fields(),
        }
        if outcome.error:
            return record.failed(done, failure.describe(outcome.error, rank=0))
        if outcome.stopped:
            return record.stopped(done, outcome.stopped, outcome.saved)
        predicted = measured.prediction(typed(done)) if is_on_gpus else None
        return done | {"predicted": predicted} if predicted else done

    done = attempt.amend(finish)
    if done is None:
        return
    if done.get("steps"):
        for log in outcome.logs:
            log.finish(done, closes=not outcome.profiles)
    if is_on_gpus:
        measured.keep(typed(done))
    if outcome.stopped and outcome.saved:
        _requeue(attempt, spec.config.cluster, done, outcome.stopped)


def _requeue(attempt: Attempt, cluster: config.Cluster, done: Written, stopped: str) -> None:
    """Have SLURM requeue the job of a run that has saved, if that is allowed; the run's record then stays open.

    Only for the signal that SLURM sends ahead of a time limit: SIGTERM means that a user cancelled the job, and SLURM
    itself requeues a job that it preempts.
    """
    if not (isinstance(cluster, config.Slurm) and cluster.requeue and stopped.startswith("SIGUSR2")):
        return
    restarts = slurm.restarts(os.environ)
    if restarts >= cluster.max_requeues:
        limit = f"{stopped}; not requeued: cluster.max_requeues={cluster.max_requeues} is reached"
        attempt.amend(lambda _: record.stopped(done, limit))
        return
    # Before the requeue: SLURM leaves no time afterwards.
    attempt.amend(lambda _: record.requeued(done, restarts + 1, cluster.max_requeues))
    if cluster.container.image and (sweep := ledger.sweep_of(attempt.directory)):  # see submission.Array.script
        (sweep / f"{slurm.REQUEUE}{os.environ['SLURM_JOB_ID']}").touch()
        return
    try:
        slurm.requeue(slurm_job(os.environ) or "")
    except SlurmError as error:
        why = f"{stopped}; it could not be requeued: {error}"
        attempt.amend(lambda _: record.stopped(done, why))


def update_record(attempt: Attempt, results: Results) -> None:
    """Add what is known so far to the record of a run in progress; without a disk sync, as more will follow."""
    fields = results.fields()
    with suppress(OSError, Damaged):  # a run continues even if its record cannot be written yet
        attempt.amend(lambda written: {**written, **fields} if record.is_open(written) else None, durable=False)


def fail(attempt: Attempt, cause: failure.Failure) -> None:
    """Record the cause of failure, unless the run's end is already known."""
    failure.write_traceback(attempt.directory, cause)
    attempt.amend(lambda written: None if record.is_settled(written) else record.failed(written, cause))


def fail_if_open(attempt: Attempt, cause: failure.Failure) -> None:
    """Record the cause of failure of a run that has recorded no end."""
    attempt.amend(lambda written: record.failed(written, cause) if record.is_open(written) else None)


def report(world: World, attempt: Attempt, error: BaseException) -> None:
    """Write this rank's failure report, and update the cause of failure in the record.

    Every rank does both: the last one to do so knows the most.
    """
    launcher = world.started_by
    mine = described = failure.describe(error, world.rank)
    with suppress(OSError):  # the disk may be full
        mine = failure.write_failure(attempt.failures, described)
    cause = _conclude(world, attempt, mine)
    if cause.rank != world.rank or is_stop(mine):
        _await_reports(world, attempt, mine)
        cause = _conclude(world, attempt, mine)
    if not launcher.has_parent and cause.rank == world.rank:
        echo(f"rank {world.rank}: {described.traceback}", sys.stderr)  # rank 0 may not live to print it
    if launcher.has_step and world.rank in (cause.rank, (failure.read_failures(attempt.failures) or [mine])[0].rank):
        # For ranks that do not notice the loss of a peer.
        slurm.end_step(os.environ, after=5 * launcher.linger_seconds)


def _conclude(world: World, attempt: Attempt, mine: failure.Failure) -> failure.Failure:
    """Return the cause of the failure as far as it is known; record it unless the record is already settled."""
    cause = mine

    def change(written: Draft) -> Written | None:
        nonlocal cause
        cause = root_cause(failure.read_failures(attempt.failures) or [mine], world.size)
        if record.is_settled(written):
            return None
        failure.write_traceback(attempt.directory, cause)
        return record.failed(written, cause)

    with suppress(OSError, Damaged):  # rank 0 may have died before it could open the record
        attempt.amend(change)
    return cause


def _await_reports(world: World, attempt: Attempt, mine: failure.Failure) -> None:
    """Give the other ranks time to report; a rank that was stopped notes in its report which ranks did not.

    It notes them only once all ranks have met: a rank that is still starting cannot report anything.
    """
    until = time.monotonic() + world.started_by.linger_seconds
    while (_silent(world, attempt) or not is_stop(mine)) and time.monotonic() < until:
        time.sleep(0.1)
    unheard = _silent(world, attempt)
    if is_stop(mine) and unheard and dist.is_initialized():
        with suppress(OSError):
            failure.amend_failure(attempt.failures, replace(mine, unheard=unheard))


def _silent(world: World, attempt: Attempt) -> list[int]:
    return sorted(set(range(world.size)) - failure.reporters(attempt.failures))


def watchdog(read: config.Config, world: World, run_store: dist.Store, attempt: Attempt) -> Watchdog:
    """Return a watchdog that ends the run if a rank is stuck, and records which rank it was."""

    def report_stuck(rank: int, message: str, stacks: str) -> None:
        stuck = failure.Failure(rank, "TimeoutError", message, stacks)  # which cannot report it itself
        with suppress(OSError):
            failure.write_failure(attempt.failures, stuck)
        _conclude(world, attempt, stuck)

    minutes = read.general.timeout_minutes
    return Watchdog(world, run_store, attempt.failures, math.inf if minutes is None else 60 * minutes, report_stuck)
