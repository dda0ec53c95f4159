"""What a workload is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ptdbench.launch.peers import Peer
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import World
from ptdbench.measure.stopwatch import Stopwatch
from ptdbench.plan import Plan
from ptdbench.training import Training


@dataclass(frozen=True)
class Job:
    """One rank's part in a run, ready to work: the ranks are in a process group.

    Attributes:
        plan: What is to be done.
        world: This rank's place.
        peers: Every rank as it describes itself, in order.
        store: A key-value store that the run's ranks share.
        device: This rank's device.
        directory: The run's directory.
        watch: Runs since the run was ready to start.
        watchdog: To be told of every step; ends the run where they stop.
    """

    plan: Plan
    world: World
    peers: Sequence[Peer]
    store: dist.Store
    device: torch.device
    directory: Path
    watch: Stopwatch
    watchdog: Watchdog

    @property
    def training(self) -> Training:
        """What is trained; only for a workload that trains."""
        assert self.plan.training is not None
        return self.plan.training


@dataclass(frozen=True)
class Outcome:
    """What came of a workload.

    Attributes:
        fields: What the record gains, on rank 0; the other ranks may know less.
        stopped: Why the run ended before it was done, such as ``SIGTERM after step 40 of 100``; it can go on later.
        figures: PNG images by name, for people: files beside the record, and TensorBoard.
        error: What is wrong with a result that is there all the same, such as a loss that is not finite.
        shown: How many of its steps TensorBoard has already.
    """

    fields: Mapping[str, Any]
    figures: Mapping[str, bytes] = field(default_factory=dict)
    error: Exception | None = None
    stopped: str | None = None
    shown: int = 0
