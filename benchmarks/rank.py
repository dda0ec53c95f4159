"""What every benchmark that runs ranks does first in each of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from ptdbench.job import Job
from ptdbench.launch import peers, rendezvous
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import discover
from ptdbench.measure.clock import Stopwatch
from ptdbench.setup import config, run_spec


@contextmanager
def joined(environ: Mapping[str, str], composed: DictConfig, directory: str) -> Iterator[Job]:
    """In a rank: its part in a run, in whose process group it is meanwhile."""
    os.environ.update({name: value for name, value in environ.items() if name not in os.environ})
    world = discover(os.environ)
    assert world is not None  # local.start has just said who this is, in torchrun's words
    world = replace(world, launcher="local")
    spec = run_spec.specify(config.read(composed), world)
    device = spec.device(world.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with rendezvous.process_group(world, spec.backend, device, key=directory) as store:
        met = peers.meet(world, device, spec.config.cluster.cpus_per_rank)
        dog = Watchdog(world, store, Path(directory), math.inf, lambda *_: None)
        yield Job(spec, world, met, store, device, Path(directory), Stopwatch(time.time()), dog)
