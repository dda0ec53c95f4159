"""One run: a directory in, a record out. Start reading here.

Every start takes this path: by hand, as a rank of torchrun, srun or mpirun, as a step of a SLURM job, or again after a
failure. The directory holds all that is known of the run: its record was opened, with its configuration and the
summary of its specification, by the process that checked it. The process that a user or a job starts (:func:`run`)
claims the record and starts the ranks (:mod:`ptdbench.run.ranks`), unless a launcher has already made this process a
rank. Each rank joins its peers, lays out the model, does the work, and agrees with its peers
on one record, which rank 0 writes.
"""

import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from ptdbench.launch import rendezvous, settings
from ptdbench.launch.world import World, discover
from ptdbench.measure.hardware import environment
from ptdbench.measure.timing import Stopwatch
from ptdbench.planning.tries import needs_search, with_found_micro_batch
from ptdbench.problems import ConfigError
from ptdbench.records import failure, ledger, ownership, record, store
from ptdbench.records.ownership import Attempt, this_process
from ptdbench.records.schema import Written
from ptdbench.report import display
from ptdbench.report.display import Display
from ptdbench.run import ending, micro_batch, ranks
from ptdbench.setup import resume, run_spec, training_spec
from ptdbench.setup.config import of_record
from ptdbench.setup.runs import Shape
from ptdbench.terminal import echo


def run(directory: Path) -> None:
    """Execute the run of a directory; its ``record.json`` reports the outcome, whatever it is.

    The directory has an open record, with the run's configuration and the summary of its specification.

    Raises:
        SystemExit: This process is a rank, and the run failed here; another start of the run is still in progress; or
            the record cannot be written, in which case no other run of the sweep could write its record either.
        Stopped: A signal asked this process to stop; the record is written.
        Damaged: The record is damaged.
    """
    variables = store.read_record(directory).variables
    try:
        with settings.added(variables or {}):
            _run(directory, discover(os.environ))
    except OSError as error:  # other errors are in the record: this one is a failure to write
        reason = f"{directory}: its record cannot be written: {error.strerror or error}"
        again = resume.command(ledger.sweep_of(directory) or directory)
        echo(f"{reason}; free some space, and continue with {again}", sys.stderr)
        raise SystemExit(1) from None


def find_micro_batch(directory: Path, shape: Shape, command: Sequence[str]) -> bool:
    """Find the micro-batch of a directory's run with steps of a SLURM job; return whether there is one.

    ``command`` starts all ranks of a run, and its directory is appended. Without a micro-batch the run has failed, and
    its record says why.

    Raises:
        SystemExit: An earlier start of the run is still in progress.
        Stopped: A signal asked this process to stop; the record is written.
    """
    attempt = _claimed(Attempt(directory, uuid.uuid4().hex), "srun")
    opened, execute = store.read_record(directory), partial(micro_batch.in_step, command)
    with settings.added(opened.variables or {}):
        return micro_batch.find(of_record(opened.written), attempt, display.heading(opened), execute, shape)


def reopen(directory: Path, world: World | None) -> bool:
    """Open the record of a directory's run again, with the summary of its specification for these ranks.

    A run that waits for its first start by as many ranks, such as the job of a sweep, is open as it is.

    Returns:
        Whether it can be executed; if not, its record says why.

    Raises:
        SystemExit: An earlier start is still in progress.
    """
    earlier = store.read_record(directory)
    if world and not earlier.owner and earlier.world_size == world.size:
        return True
    config = of_record(earlier.written)
    variables = earlier.variables or {}
    draft = record.begin(config.resolved, directory, {}) | {"variables": variables}
    is_refused = False
    try:
        with settings.added(variables):
            draft |= run_spec.summarize(with_found_micro_batch(config, earlier), world)
    except ConfigError as error:
        is_refused = True
        draft = record.failed(draft, failure.describe(error, rank=-1))
    _opened(directory, draft)
    return not is_refused


def _run(directory: Path, world: World | None) -> None:
    """Execute a run, from the point of view of the process that starts it."""
    if world:
        settings.enable_expandable_segments(os.environ)
    attempt = Attempt(directory, rendezvous.launch_name(world) if world else uuid.uuid4().hex)
    is_first = ranks.count(directory) == 1
    watch = Stopwatch(psutil.Process().create_time() if world and is_first else time.time())
    if world is None or world.is_first:
        attempt = _claimed(attempt, world.launcher if world else "local")
    opened = store.read_record(directory)
    heading = display.heading(opened)
    if world:
        ranks.of_launcher(world, attempt, watch, heading)
        return
    config = of_record(opened.written)
    try:  # an OSError comes from the data: no record is written in this block
        if opened.layout.data:  # it trains: so that bad data is reported before any rank starts
            with Display(heading, stays=False) as shown:  # it may include a download
                shown.phase("preparing the data")
                training_spec.prepare_data(config)
    except BaseException as error:
        ending.fail(attempt, failure.describe(error, rank=-1))
        if not isinstance(error, Exception):
            raise
        return
    if not needs_search(config) or micro_batch.find(config, attempt, heading, run):
        ranks.start(config, attempt, watch, heading)


def _claimed(attempt: Attempt, launcher: str) -> Attempt:
    """Claim the run's directory for this start; raises SystemExit if an earlier start is still in progress."""
    owner = this_process(attempt.launch, os.environ)
    written = store.load_record(attempt.directory)
    draft = record.started(written, attempt.directory, environment("cpu"), owner, launcher)
    return replace(attempt, draft=_opened(attempt.directory, draft))


def _opened(directory: Path, draft: Written) -> Written:
    """Open the record of a start; raises SystemExit if an earlier one is still in progress."""
    try:
        return ownership.open_record(directory, draft)
    except ConfigError as held:
        echo(str(held), sys.stderr)
        raise SystemExit(1) from None
