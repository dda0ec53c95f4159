"""Run a function, in place of the workload, in the ranks of a run."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ptdbench.job import Job
from ptdbench.launch import local, peers, rendezvous
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import World, discover
from ptdbench.measure.timing import Stopwatch
from ptdbench.setup import run_spec
from ptdbench.setup.config import Config
from ptdbench.setup.run_spec import RunSpec


def on_ranks(config: Config, body: Callable[..., Any], *arguments: Any, within: str | None = None) -> Any:
    """Call ``body(job, *arguments)`` in the ranks of a run, and return rank 0's result, by way of JSON.

    Args:
        config: The configuration of the run, which decides the number of ranks.
        body: A function that can be pickled.
        arguments: Can be pickled too.
        within: Where to create the run's directory meanwhile; by default among temporary files.
    """
    size = run_spec.specify(config, None).world_size
    with TemporaryDirectory(dir=within) as directory:
        where = run_spec.place(config, size)
        local.start(_in_rank, size, config, directory, body, *arguments, where=where)
        return json.loads(Path(directory, "returned.json").read_text())


def job_of(config: Config, job: Job) -> Job:
    """Return the job of another run of the same ranks, in their process group."""
    return replace(job, spec=_built(config, job.world))


def _built(config: Config, world: World) -> RunSpec:
    training = run_spec.specify(config, world).training
    return run_spec.build(config, training.layout if training else None, world)


def _in_rank(
    environ: Mapping[str, str], config: Config, directory: str, body: Callable[..., Any], *arguments: Any
) -> None:
    os.environ.update({name: value for name, value in environ.items() if name not in os.environ})
    world = discover(os.environ)
    assert world is not None  # local.start has just set torchrun's variables
    world = replace(world, launcher="local")
    spec = _built(config, world)
    device = spec.device(world.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with rendezvous.process_group(world, spec.backend, device, key=directory) as store:
        peers.bind_to_share(world, spec.config.cluster.cpus_per_rank)
        met = peers.gather_peers(world, device)
        dog = Watchdog(world, store, Path(directory), math.inf, lambda *_: None)
        job = Job(spec, world, met, store, device, Path(directory), Stopwatch(time.time()), dog)
        returned = body(job, *arguments)
        if world.is_first:
            Path(directory, "returned.json").write_text(json.dumps(returned))
