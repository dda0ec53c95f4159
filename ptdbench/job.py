"""The interface of a workload: its protocol, its input (`Job`) and its result (`Outcome`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from msgspec import UNSET, UnsetType

from ptdbench.files import strict
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import Peer, World
from ptdbench.measure.results import Findings
from ptdbench.measure.timing import Stopwatch
from ptdbench.records import schema
from ptdbench.report.display import Display
from ptdbench.report.loggers import Log
from ptdbench.setup.run_spec import RunSpec
from ptdbench.setup.training_spec import TrainingSpec


class Workload(Protocol):
    """The type of ``workload=<name>``: an object that does the work of one rank.

    A workload that does not train stores its results in the record field named after it, such as
    ``Outcome({"mine": {"ranks": 2}})`` for one from outside ptdbench, whose results are shown as recorded.
    """

    trains: bool  #: Whether it needs a model, data, an optimizer and a layout.

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for ranks, devices or a backend that it does not support; called before anything starts."""
        ...

    def __call__(self, job: Job) -> Outcome:
        """Do the work; called in every rank."""
        ...


@dataclass(frozen=True)
class Job:
    """One rank's view of a run whose process group is initialized."""

    spec: RunSpec  #: The specification of the run.
    world: World  #: This rank's position in the world.
    peers: Sequence[Peer]  #: The description of every rank, in order.
    store: dist.Store  #: A key-value store that the run's ranks share.
    device: torch.device  #: This rank's device.
    directory: Path  #: The run's directory.
    watch: Stopwatch  #: Stopwatch started when the run was ready to start.
    watchdog: Watchdog  #: Notified of every step; ends a run that makes no progress.
    display: Display = field(default_factory=Display)  #: The progress display; visible on rank 0 only.
    #: Adds results to the record during the run, so that they survive however the run ends; called on rank 0.
    note: Callable[[Results], None] = lambda _: None
    #: Writes the result of the run, which no later failure changes; called on rank 0. A workload that goes on after its
    #: result is known calls it before, and returns an outcome without ``logs``, as they are closed.
    conclude: Callable[[Outcome], None] = lambda _: None

    @property
    def training(self) -> TrainingSpec:
        """The training specification; only if the workload trains."""
        assert self.spec.training is not None
        return self.spec.training


class Results(Findings, kw_only=True):
    """Results of a workload, named as their fields of the record; those that are not given stay as they are there.

    Only the first rank needs all of them.
    """

    warmup_steps: int | None = None
    metrics: schema.Metrics | None = None
    steps: int | UnsetType | None = UNSET
    final_loss: float | UnsetType | None = UNSET
    evaluations: Sequence[schema.Evaluation] | None = None
    segments: Sequence[schema.Segment] | None = None
    remarks: schema.Remarks | None = None
    hardware: schema.Hardware | None = None
    experts: schema.Experts | None = None
    virtual: schema.Virtual | None = None
    phases: schema.Phases | None = None
    memory: schema.Memory | None = None

    def fields(self) -> dict[str, object]:
        """Return the fields to write, in JSON types."""
        values = {name: getattr(self, name) for name in Results.__struct_fields__}
        return strict({name: value for name, value in values.items() if value is not getattr(_NOTHING, name)})


_NOTHING = Results()


class Outcome(Results):
    """The results of a workload, and how it ended."""

    #: The results of a workload from outside ptdbench, a mapping or a struct, under its name.
    results: Mapping[str, object] = {}
    #: An error that does not void the result, such as a loss that is not finite. It must be the same on every rank, as
    #: must ``stopped``: both decide what happens next.
    error: Exception | None = None
    stopped: str | None = None  #: Why the run ended early, such as ``SIGTERM after step 40 of 100``.
    profiles: bool = False  #: Whether the phases of a step are still to come.
    saved: bool | None = None  #: Whether a run that ended early saved its last step; ``None`` without checkpoints.
    logs: Sequence[Log] = ()  #: The loggers that send the run's curves to TensorBoard or a logging service, on rank 0.

    def fields(self) -> dict[str, object]:
        """See :class:`Results`."""
        return strict(self.results) | super().fields()
