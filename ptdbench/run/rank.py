"""A rank's part of a run: its device, its peers, the work, and what it leaves if it fails."""

import faulthandler
import os
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from ptdbench.job import Job, Workload
from ptdbench.launch import devices, local, peers, rendezvous
from ptdbench.launch.watchdog import JOINED
from ptdbench.launch.world import World
from ptdbench.measure import hardware, memory
from ptdbench.measure.clock import Stopwatch
from ptdbench.parallel.dims import BatchPlan
from ptdbench.planning import tries
from ptdbench.problems import ConfigError
from ptdbench.records import failure, store
from ptdbench.records.ownership import Attempt
from ptdbench.report.display import Display, Heading
from ptdbench.run import ending
from ptdbench.setup import checks, choices, run_spec
from ptdbench.setup.config import of_record
from ptdbench.setup.run_spec import RunSpec

#: The runs of this process so far; only a rank's first run pays for the imports.
_RUNS: list[Path] = []


def count(directory: Path) -> int:
    """Count another run of this process; return its number, from 1."""
    _RUNS.append(directory)
    return len(_RUNS)


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
    if not world.started_by.has_parent:
        devices.check(world, str(config.resolved.get("device")), str(config.resolved.get("backend")))
    devices.select(world, str(config.resolved.get("device")))
    spec = run_spec.build(config, layout, world)
    if not (world.started_by.has_parent and spec.device_type == "cpu"):  # the parent has checked the host
        run_spec.check_memory(spec, world)
    watch.lap("config")
    return spec


def _work(spec: RunSpec, world: World, attempt: Attempt, watch: Stopwatch, display: Display) -> None:
    """Do the work of a rank: the run, from the point of view of a rank."""
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
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if len(_RUNS) > 1:  # the previous run's model would otherwise still occupy memory
        memory.release(device)
    if spec.training:
        checks.check_gpu_precision(spec.config.general.precision, device)
    hardware.allow_tf32(spec.config.general.precision == "tf32")
    return device
