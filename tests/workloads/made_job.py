"""Jobs without a launcher around them, and those that are refused."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from ptdbench.job import Job
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import World
from ptdbench.measure.timing import Stopwatch
from ptdbench.setup import config, run_spec
from tests.conftest import read
from tests.refusals import refusal_of


def refusal(*overrides: str) -> str:
    return refusal_of(run_spec.specify, read(*overrides), None)


def job(directory: Path, configuration: DictConfig) -> Job:
    """This rank's part of a run on the CPU, in a group of ranks of one host; its watchdog sleeps."""
    directory.mkdir(parents=True, exist_ok=True)  # as that of a run
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), "local")
    asked = config.read(configuration)
    specified = run_spec.specify(asked, world).training
    spec = run_spec.build(asked, specified.layout if specified else None, world)
    store = dist.PrefixStore(str(directory), dist.distributed_c10d._get_default_store())
    dog = Watchdog(world, store, directory, math.inf, lambda *_: None)
    return Job(spec, world, [], store, torch.device("cpu"), directory, Stopwatch(0.0), dog)
