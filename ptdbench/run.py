"""One run: a directory in, a record out. Start reading here.

Every start takes this path: by hand, as a rank of torchrun, srun or mpirun, as a SLURM job, or again after a failure.
The process that a user or a job starts (:func:`run`) checks the run, opens its record and starts the ranks, unless a
launcher has already made this process a rank. Each rank (:func:`take_part`) joins its peers, lays out the model, does
the work, and agrees with its peers on one record, which rank 0 writes.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from ptdbench import ending
from ptdbench.job import Job, Workload
from ptdbench.launch import crash, devices, forced_exit, local, peers, rendezvous, settings
from ptdbench.launch.slurm import JobSteps
from ptdbench.launch.watchdog import JOINED
from ptdbench.launch.world import REFUSED_WAIT, World, discover, is_first_rank
from ptdbench.measure import hardware, memory
from ptdbench.measure.clock import Stopwatch
from ptdbench.measure.hardware import environment
from ptdbench.planning import micro_batch
from ptdbench.problems import ConfigError
from ptdbench.records import failure, ledger, ownership, record, store
from ptdbench.records.failure import root_cause
from ptdbench.records.ownership import Attempt, this_process
from ptdbench.records.schema import MicroBatch, part
from ptdbench.report import labels
from ptdbench.report.display import Display, Heading
from ptdbench.setup import checks, choices, resume, run_spec, training_spec
from ptdbench.setup.config import Config, of_record
from ptdbench.setup.run_spec import RunSpec, Summary
from ptdbench.terminal import echo, transient

#: Seconds that ranks get to finish the current step and record their results when the run is asked to stop: without and
#: with a checkpoint to save.
STOP_GRACE, SAVE_GRACE = 10.0, 120.0

#: The runs of this process so far; only a rank's first run pays for the imports.
_RUNS: list[Path] = []


def run(
    directory: Path, config: Config | None = None, known: Summary | None = None, heading: Heading | None = None
) -> None:
    """Execute the run of a directory; its ``record.json`` and its sweep's results report the outcome, whatever it is.

    Args:
        directory: The run's directory, which exists.
        config: Its configuration, if this process has composed it; by default the one in the directory's record.
        known: The run's summary, if this process has already specified it.
        heading: The heading of the run's display; by default its name.

    Raises:
        SystemExit: This process is a rank, and the run failed here; another start of the run is still in progress; or
            the record cannot be written, in which case no other run of the sweep could write its record either.
        Stopped: A signal asked this process to stop; the record is written.
        Damaged: The configuration must be read from the record, which is damaged.
    """
    config, sweep = config or of_record(store.load_record(directory)), ledger.sweep_of(directory)
    try:
        try:
            _run(directory, config, known, heading)
        finally:
            if sweep and is_first_rank(os.environ):
                _add_result(sweep, directory)
    except OSError as error:  # _run handles its other errors: this one is a failure to write
        reason = f"{directory}: its record cannot be written: {error.strerror or error}"
        echo(f"{reason}; free some space, and continue with {resume.command(sweep or directory)}", sys.stderr)
        raise SystemExit(1) from None


def find_micro_batch(directory: Path, steps: JobSteps) -> bool:
    """Find the micro-batch of a directory's run with steps of the SLURM job whose batch script started this process.

    The ranks that the script starts next read it from the record.

    Returns:
        Whether one was found; if not, the run has failed, and its record says why.
    """
    config, sweep = of_record(store.load_record(directory)), ledger.sweep_of(directory)
    attempt = _open_record(config, Attempt(directory, uuid.uuid4().hex))
    try:
        return _find_micro_batch(config, attempt, Heading(labels.name(attempt.draft or {})), steps) is not None
    finally:
        if sweep:
            _add_result(sweep, directory)


def _add_result(sweep: Path, directory: Path) -> None:
    written = store.load_record(directory)
    if not record.is_open(written):
        store.append_result(sweep, written)


def _run(directory: Path, config: Config, known: Summary | None, heading: Heading | None) -> None:
    """Execute a run, from the point of view of the process that starts it."""
    world = discover(os.environ)
    if world:
        settings.enable_expandable_segments(os.environ)
        settings.log_errors_only(os.environ)
    attempt = Attempt(directory, rendezvous.launch_name(world) if world else uuid.uuid4().hex)
    watch = Stopwatch(time.time() if world is None or _RUNS else psutil.Process().create_time())
    _RUNS.append(directory)
    writes = world is None or world.is_first
    if writes:
        attempt = _open_record(config, attempt)
    try:
        if world:
            rendezvous.export(world, os.environ)  # a user's model may read its rank when it is constructed
            devices.check(world, str(config.resolved.get("device")), str(config.resolved.get("backend")))
            with crash.kept(failure.crash_file(attempt.failures, world.rank)):
                config = micro_batch.with_found_micro_batch(config, store.earlier_record(directory))
                spec = _specify(config, world, watch)
            known = spec.summary
        else:
            known = known or run_spec.summarize(config, None)
        heading = heading or Heading(labels.name(record.begin(config.resolved, directory, {}) | dict(known.fields)))
        if known.trains and not world:  # so that bad data is reported before any rank starts
            _prepare_data(config, heading)
    except BaseException as error:  # an OSError comes from the data or the model: no record is written in this block
        _leave(world, attempt, error)
        return
    if writes:
        fields = {**known.fields, "launcher": world.launcher if world else "local"}
        attempt = replace(attempt, draft=attempt.amend(lambda written: written | fields))
    if world:
        take_part(lambda: spec, world, attempt, watch, heading)
        return
    if known.warning:
        echo(known.warning, sys.stderr)
    if micro_batch.needs_search(config):
        found = _find_micro_batch(config, attempt, heading, None)
        if found is None:
            return
        config, known = found.config, found.summary
    _start_ranks(config, known.world_size, attempt, watch, heading)


def _leave(world: World | None, attempt: Attempt, error: BaseException) -> None:
    """Abandon a run that cannot begin; this process ends too at a signal, or if rank 0 would wait for this rank."""
    refused = isinstance(error, ConfigError)
    if world is None or (refused and world.is_first):
        _fail(attempt, failure.describe(error, rank=-1))
        if not isinstance(error, Exception):
            raise error
        return
    until = time.monotonic() + REFUSED_WAIT
    while refused and time.monotonic() < until:
        with suppress(FileNotFoundError, store.Damaged):
            written = store.load_record(attempt.directory)
            if attempt.owns(written) and record.is_settled(written):
                return
        time.sleep(0.1)
    _report(world, attempt, error)


def _find_micro_batch(
    config: Config, attempt: Attempt, heading: Heading, steps: JobSteps | None
) -> micro_batch.Found | None:
    """Find the micro-batch of a run, which then continues as if it had been given; ``None`` if the run has failed."""

    def note(field: Mapping[str, Any]) -> None:
        attempt.amend(lambda written: written | {"micro_batch": field}, durable=False)

    carry_out = partial(_in_step, steps) if steps else _run
    finder = micro_batch.Finder(attempt.directory, config, heading, carry_out, note, steps)
    earlier = part(attempt.draft or {}, MicroBatch).found
    try:
        found = (finder.given(earlier) if earlier else None) or finder.find()
    except (ConfigError, MemoryError, RuntimeError) as error:
        _fail(attempt, failure.describe(error, rank=-1))
        return None
    except local.Stopped as stop:
        _fail_if_open(attempt, failure.describe(stop, rank=-1))
        raise
    fields = dict(found.summary.fields) | ({} if found.field["found"] == earlier else {"micro_batch": found.field})
    attempt.amend(lambda written: written | fields)
    return found


def _in_step(steps: JobSteps, directory: Path, config: Config, known: Summary, heading: Heading) -> None:
    """Execute a run as a step of the job; if the step ends without a result, record that as the failure."""
    store.write_record(directory, record.begin(config.resolved, directory, {}) | dict(known.fields))
    echo(f"{heading}", sys.stderr)
    status = steps.start(directory)
    written = store.load_record(directory)
    if record.is_open(written):
        cause = failure.of_launcher("Gone", f"its step ended with exit status {status} and without a result")
        store.write_record(directory, record.failed(written, cause))


def _prepare_data(config: Config, heading: Heading | None) -> None:
    """Prepare the data once per machine, which may include a download."""
    with Display(heading, stays=False) as display:
        display.phase("preparing the data")
        training_spec.prepare_data(config)


def _start_ranks(config: Config, size: int, attempt: Attempt, watch: Stopwatch, heading: Heading | None) -> None:
    """Start local ranks; if one fails, determine the cause from the reports that they left."""
    grace = SAVE_GRACE if config.checkpoint.every_steps else STOP_GRACE
    killed = memory.oom_kills()
    try:
        with transient(f"{heading} · starting the ranks…", sys.stderr):
            where = run_spec.place(config, size)
            local.start(_as_rank, size, config, attempt, watch, heading, grace=grace, where=where)
    except ConfigError as lack:  # the tools to build virtual GPUs are missing
        _fail(attempt, failure.describe(lack, rank=-1))
    except local.RankDied as death:
        ended = failure.describe_exits(death.exit_codes, size, memory.oom_kills() - killed)
        _fail(attempt, root_cause([*failure.read_failures(attempt.failures), *ended], size))
    except local.LaunchError as error:
        _fail(attempt, failure.describe(error, rank=-1))
    except local.Stopped as stop:
        reports = failure.read_failures(attempt.failures)
        # A stopped rank does not know that all were. Without reports the ranks may have saved, and recorded it.
        conclude = _fail if reports and all(map(failure.is_stop, reports)) else _fail_if_open
        conclude(attempt, failure.describe(stop, rank=-1))
        raise
    else:
        _fail_if_open(attempt, failure.without_result())
    finally:
        failure.clear(attempt.failures)


def _fail(attempt: Attempt, cause: failure.Failure) -> None:
    failure.write_traceback(attempt.directory, cause)
    attempt.amend(lambda written: None if record.is_settled(written) else record.failed(written, cause))


def _fail_if_open(attempt: Attempt, cause: failure.Failure) -> None:
    attempt.amend(lambda written: record.failed(written, cause) if record.is_open(written) else None)


def _as_rank(
    environ: Mapping[str, str], config: Config, attempt: Attempt, watch: Stopwatch, heading: Heading | None
) -> None:
    """Run as a local rank, after applying the settings that the fork server could not know."""
    local.die_on_signals()
    settings.enable_expandable_segments(os.environ)
    settings.log_errors_only(os.environ)
    settings.enable_sanitizer(os.environ)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all peers are on this machine
    world = discover(os.environ)
    assert world is not None  # local.start has just set torchrun's variables
    world = replace(world, launcher="local")
    take_part(lambda: _specify(config, world, watch), world, attempt, watch, heading)


def take_part(
    specified: Callable[[], RunSpec], world: World, attempt: Attempt, watch: Stopwatch, heading: Heading | None
) -> None:
    """Execute one rank's part of a run; rank 0 displays progress under ``heading``.

    Raises:
        SystemExit: The run failed here; the reason is in the run's directory.
    """
    forced_exit.on_forced_exit(partial(ending.remark, attempt, world.rank))
    with crash.kept(failure.crash_file(attempt.failures, world.rank)):
        try:
            with ending.witness(world, attempt), Display(heading if world.is_first else None) as display:
                _work(specified(), world, attempt, watch, display)
        except BaseException as error:
            _report(world, attempt, error)


def _report(world: World, attempt: Attempt, error: BaseException) -> NoReturn:
    """Write this rank's failure report, and exit."""
    try:
        local.ignore_signals()  # the launcher signals all ranks as soon as it sees that one has failed
    except local.Stopped:  # a signal had already arrived
        local.ignore_signals()
    ending.report(world, attempt, error)
    raise SystemExit(1) from error


def _specify(config: Config, world: World, watch: Stopwatch) -> RunSpec:
    watch.lap("import")
    devices.select(world, str(config.resolved.get("device")))
    spec = run_spec.specify(config, world)
    if not (world.started_by.has_parent and spec.device_type == "cpu"):  # the parent has checked the host
        warning = run_spec.check_memory(spec, world)
        if warning and world.is_first:
            echo(warning, sys.stderr)
    watch.lap("config")
    return spec


def _work(spec: RunSpec, world: World, attempt: Attempt, watch: Stopwatch, display: Display) -> None:
    """Do the work of a rank: the run, from the point of view of a rank."""
    device = _prepared_device(spec, world)
    key = str(attempt.directory)
    run_store = rendezvous.run_store(key)
    patience = rendezvous.patience_for(spec.config.general.timeout_minutes)
    with (
        ending.watchdog(spec.config, world, run_store, attempt) as dog,
        rendezvous.process_group(world, spec.backends, device, key, dog.limited, patience),
    ):
        with dog.limited(JOINED):
            met = peers.meet(world, device, spec.config.cluster.cpus_per_rank)
        watch.lap("rendezvous")
        note = partial(ending.update_record, attempt)
        conclude = partial(ending.write_result, attempt, spec, device, met)
        display.phase("working")  # until the workload sets a more specific phase
        workload: Workload = choices.build(spec.config, "workload")
        at = attempt.directory
        outcome = workload(Job(spec, world, met, run_store, device, at, watch, dog, display, note, conclude))
        if world.is_first:
            with dog.paused():
                conclude(outcome)


def _prepared_device(spec: RunSpec, world: World) -> torch.device:
    """Return this rank's device, set to the requested arithmetic and freed of the previous run's memory."""
    device = spec.device(world.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if len(_RUNS) > 1:  # the previous run's model would otherwise still occupy memory
        memory.release(device)
    if spec.training:
        checks.check_gpu_precision(spec.config.general.precision, device)
    hardware.allow_tf32(spec.config.general.precision == "tf32")
    return device


def _open_record(config: Config, attempt: Attempt) -> Attempt:
    """Claim the run's directory for this start; raises SystemExit if an earlier start is still in progress."""
    owner = this_process(attempt.launch, os.environ)
    draft = record.begin(config.resolved, attempt.directory, environment("cpu"), owner=owner)
    try:
        return replace(attempt, draft=ownership.open_record(attempt.directory, draft))
    except ConfigError as held:
        echo(str(held), sys.stderr)
        raise SystemExit(1) from None
