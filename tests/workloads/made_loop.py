"""Step loops without a run around them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ptdbench.data.feed import Feed
from ptdbench.data.protocol import Data
from ptdbench.optim.schedules import Constant, Schedule
from ptdbench.parallel.dims import BatchPlan
from ptdbench.parallel.engine import Engine
from ptdbench.setup.config import Train
from ptdbench.training.loop import StepLoop, Update

CPU = torch.device("cpu")
TRAIN = {
    "global_batch": 1, "micro_batch": "auto", "steps": 100, "warmup_steps": 0, "max_minutes": None, "clip_norm": None,
    "decay": "all",
}  # fmt: skip


def step_loop(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    data: Data,
    where: BatchPlan,
    replica: int = 0,
    schedule: Schedule | None = None,
    **train: Any,
) -> StepLoop:
    """A loop on the CPU; ``train`` are options of the group of that name."""
    update = Update(engine, optimizer, schedule or Constant(), Train(**{**TRAIN, **train}), CPU)
    mesh: Any = SimpleNamespace(dp=SimpleNamespace(get_local_rank=lambda: replica))
    return StepLoop(engine, update, Feed(data, partial(where.rows, replica=replica), CPU), CPU, mesh)
