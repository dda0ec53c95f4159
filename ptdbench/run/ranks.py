"""The ranks of a run, started and watched on this machine; and the part of each, from its device to its failure."""

import faulthandler
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from ptdbench.job import Job, Workload
from ptdbench.launch import local, peers, rendezvous, settings
from ptdbench.launch.watchdog import JOINED
from ptdbench.launch.world import World, discover
from ptdbench.measure import hardware, memory
from ptdbench.measure.timing import Stopwatch
from ptdbench.parallel.dims import BatchPlan
from ptdbench.planning import tries
from ptdbench.problems import ConfigError
from ptdbench.records import failure, store
from ptdbench.records.ownership import Attempt
from ptdbench.report.display import Display, Heading
from ptdbench.run import ending
from ptdbench.setup import checks, choices, run_spec
from ptdbench.setup.config import Config, of_record
from ptdbench.setup.run_spec import RunSpec
from ptdbench.terminal import transient
from ptdbench.virtual import computed

#: Seconds that ranks get to finish the current step and record their results when the run is asked to stop: without and
#: with a checkpoint to save.
STOP_GRACE, SAVE_GRACE = 10.0, 120.0

#: The runs of this process so far; only a rank's first run pays for the imports.
_RUNS: list[Path] = []


def count(directory: Path) -> int:
    """Count another run of this process; return its number, from 1."""
    _RUNS.append(directory)
    return len(_RUNS)


def start(config: Config, attempt: Attempt, watch: Stopwatch, heading: Heading) -> None:
    """Start the ranks of a claimed run; if one fails, determine the cause from the reports that they left.

    Raises:
        Stopped: A signal asked this process to stop; the record is written.
    """
    size = store.load_record(attempt.directory)["world_size"]
    grace = SAVE_GRACE if config.checkpoint.every_steps else STOP_GRACE
    killed = memory.oom_kills()
    try:
        with transient(f"{heading} · starting the ranks…", sys.stderr):
            where = run_spec.place(config, size)
            local.start(_as_rank, size, attempt, watch, heading, grace=grace, where=where)
    except ConfigError as lack:  # the tools to build virtual GPUs are missing
        ending.fail(attempt, failure.describe(lack, rank=-1))
    except local.RankDied as death:
        exits = failure.describe_exits(death.exit_codes, size, memory.oom_kills() - killed)
        ending.fail(attempt, failure.root_cause([*failure.read_failures(attempt.failures), *exits], size))
    except local.LaunchError as error:
        ending.fail(attempt, failure.describe(error, rank=-1))
    except local.Stopped as stop:
        reports = failure.read_failures(attempt.failures)
        # A stopped rank does not know that all were. Without reports the ranks may have saved, and recorded it.
        conclude = ending.fail if reports and all(map(failure.is_stop, reports)) else ending.fail_if_open
        conclude(attempt, failure.describe(stop, rank=-1))
        raise
    else:
        reason = "every rank ended with exit status 0 and without a result"
        ending.fail_if_open(attempt, failure.Failure(-1, "ExitStatus", reason))


def of_launcher(world: World, attempt: Attempt, watch: Stopwatch, heading: Heading) -> None:
    """Take part in a run as one of a launcher's ranks; if any of them is refused, all return, and its record says why.

    Raises:
        SystemExit: The run failed here; the reason is in the run's directory.
    """
    spec = refused = None
    faulthandler.enable(2)  # print stacks on stderr if native code crashes
    try:
        rendezvous.export(world, os.environ)  # a user's model may read its rank when it is constructed
        spec = _built(attempt, world, watch)
    except ConfigError as error:
        refused = error
    except BaseException as error:
        _report(world, attempt, error)
    try:
        rendezvous.agree(f"specified {len(_RUNS)}", world, lambda: "by all", refused)
    except ConfigError as error:
        if world.is_first:
            ending.fail(attempt, failure.describe(error, rank=-1))
        return
    assert spec
    take_part(world, attempt, watch, heading, spec)


def take_part(world: World, attempt: Attempt, watch: Stopwatch, heading: Heading, spec: RunSpec | None = None) -> None:
    """Execute one rank's part of a run; rank 0 displays progress under ``heading``. ``spec`` if already built.

    Raises:
        SystemExit: The run failed here; the reason is in the run's directory.
    """
    try:
        with Display(heading if world.is_first else None) as display:
            _work(spec or _built(attempt, world, watch), world, attempt, watch, display)
    except BaseException as error:
        _report(world, attempt, error)


def _as_rank(environ: Mapping[str, str], attempt: Attempt, watch: Stopwatch, heading: Heading) -> None:
    """Run as a local rank, after applying the settings that the fork server could not know."""
    local.die_on_signals()
    settings.enable_expandable_segments(os.environ)
    settings.enable_sanitizer(os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all peers are on this machine
    world = discover(os.environ)
    assert world is not None  # local.start has just set torchrun's variables
    take_part(replace(world, launcher="local"), attempt, watch, heading)


def _report(world: World, attempt: Attempt, error: BaseException) -> NoReturn:
    """Write this rank's failure report, and exit."""
    try:
        local.ignore_signals()  # the launcher signals all ranks as soon as it sees that one has failed
    except local.Stopped:  # a signal had already arrived
        local.ignore_signals()
    ending.report(world, attempt, error)
    raise SystemExit(1) from error


def _built(attempt: Attempt, world: World, watch: Stopwatch) -> RunSpec:
    """Build the specification of the run from its record; raises ConfigError if this rank cannot execute it."""
    watch.lap("import")
    record = store.read_record(attempt.directory)
    config = tries.with_found_micro_batch(of_record(record.written), record)
    layout = BatchPlan.of(record.written["layout"]) if record.layout.data else None
    device, backend = (str(config.resolved.get(option)) for option in ("device", "backend"))
    peers.require_devices(world, device, backend)
    peers.select_gpu(world, device)
    spec = run_spec.build(config, layout, world)
    if not (world.started_by.has_parent and spec.device_type == "cpu"):  # the parent has checked the host
        run_spec.check_memory(spec, world)
    watch.lap("config")
    return spec


def _work(spec: RunSpec, world: World, attempt: Attempt, watch: Stopwatch, display: Display) -> None:
    device = _prepared_device(spec, world)
    key = f"run {len(_RUNS)}"  # ranks may name the directory differently
    run_store = rendezvous.run_store(key)
    patience = rendezvous.patience_for(spec.config.general.timeout_minutes)
    with (
        ending.watchdog(spec.config, world, run_store, attempt) as dog,
        rendezvous.process_group(world, spec.backends, device, key, dog.limited, patience),
    ):
        with dog.limited(JOINED):
            peers.bind_to_share(world, spec.config.cluster.cpus_per_rank)
            met = peers.gather_peers(world, device)
        watch.lap("rendezvous")
        note = partial(ending.update_record, attempt)
        conclude = partial(ending.write_result, attempt, spec, device, met)
        display.phase("working")  # until the workload sets a more specific phase
        workload: Workload = choices.build(spec.config, "workload")
        directory = attempt.directory
        outcome = workload(Job(spec, world, met, run_store, device, directory, watch, dog, display, note, conclude))
        if world.is_first:
            with dog.paused():
                conclude(outcome)


def _prepared_device(spec: RunSpec, world: World) -> torch.device:
    """Return this rank's device, set to the requested arithmetic and freed of the previous run's memory."""
    device = spec.device(world.local_rank)
    if spec.virtual:
        computed.attach()  # a model may branch on whole numbers, such as the positions of tokens
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if len(_RUNS) > 1:  # the previous run's model would otherwise still occupy memory
        memory.release(device)
    if spec.training:
        checks.check_gpu_precision(spec.config.general.precision, device)
    hardware.allow_tf32(spec.config.general.precision == "tf32")
    return device
