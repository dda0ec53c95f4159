"""What a workload is, what it is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ptdbench.launch.peers import Peer
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import World
from ptdbench.measure.stopwatch import Stopwatch
from ptdbench.setup.run_spec import RunSpec
from ptdbench.setup.training_spec import TrainingSpec


class Workload(Protocol):
    """What ``workload=<name>`` is: an object that does the work of one rank.

    Attributes:
        trains: Whether it needs a model, data, an optimizer and a layout.

    One that does not train leaves what it found in the record's field of its own name, and has a static method
    ``show(found, width) -> str`` that makes plain text of it, ``width`` columns wide where figures allow.
    """

    trains: bool

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raises ConfigError for ranks, devices or a backend that it cannot work with; nothing has started yet."""
        ...

    def __call__(self, job: Job) -> Outcome:
        """Do the work; called in every rank."""
        ...


@dataclass(frozen=True)
class Job:
    """One rank's part in a run, ready to work: the ranks are in a process group.

    Attributes:
        spec: What is to be done.
        world: This rank's place.
        peers: Every rank as it describes itself, in order.
        store: A key-value store that the run's ranks share.
        device: This rank's device.
        directory: The run's directory.
        watch: Runs since the run was ready to start.
        watchdog: To be told of every step; ends the run where they stop.
    """

    spec: RunSpec
    world: World
    peers: Sequence[Peer]
    store: dist.Store
    device: torch.device
    directory: Path
    watch: Stopwatch
    watchdog: Watchdog

    @property
    def training(self) -> TrainingSpec:
        """What is trained; only for a workload that trains."""
        assert self.spec.training is not None
        return self.spec.training


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
