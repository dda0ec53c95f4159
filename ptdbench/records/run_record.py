"""The record of a run as its readers get it: parsed once, with an attribute for each field."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import field
from msgspec.structs import asdict, replace

from ptdbench.files import strict
from ptdbench.records import schema
from ptdbench.records.effects import EARLIER, affects
from ptdbench.records.schema import Configuration, Draft, Identity, Record, Written
from ptdbench.terminal import command, under

#: The type of error of a record that was opened and not yet closed.
UNFINISHED = "Unfinished"

#: The type of error of a run whose job SLURM did not take.
NOT_SUBMITTED = "NotSubmitted"

#: The types of error of runs that were interrupted, among them states in which SLURM ended a job.
_INTERRUPTED = (UNFINISHED, NOT_SUBMITTED, "Gone", "CANCELLED", "NODE_FAIL", "BOOT_FAIL", "REVOKED")


R = TypeVar("R", bound="RunRecord")


class RunRecord(Record, kw_only=True, eq=False):
    """A record with an attribute for each field of :class:`ptdbench.records.schema.Record`.

    Groups that are null or missing are empty: their fields are ``None``, an error has no type, a list no items.
    """

    nodes: list[str] = field(default_factory=list)
    layout: schema.Layout = field(default_factory=schema.Layout)
    metrics: schema.Metrics = field(default_factory=schema.Metrics)
    phases: schema.Phases = field(default_factory=schema.Phases)
    memory: schema.Memory = field(default_factory=schema.Memory)
    hardware: schema.Hardware = field(default_factory=schema.Hardware)
    error: schema.Error = field(default_factory=lambda: schema.Error(rank=-1, type="", message="", traceback=""))
    remarks: schema.Remarks = field(default_factory=schema.Remarks)
    environment: schema.Environment = field(default_factory=schema.Environment)
    config: dict[str, Any] = field(default_factory=dict)
    evaluations: list[schema.Evaluation] = field(default_factory=list)
    segments: list[schema.Segment] = field(default_factory=list)
    virtual: schema.Virtual = field(default_factory=schema.Virtual)
    micro_batch: schema.MicroBatch = field(default_factory=schema.MicroBatch)
    plan: schema.Plan = field(default_factory=schema.Plan)
    predicted: schema.Predicted = field(default_factory=schema.Predicted)
    experts: schema.Experts = field(default_factory=schema.Experts)
    #: The record as it is written, with fields that only a user's workload knows.
    written: Draft = field(default_factory=dict)

    @classmethod
    def of(cls: type[R], written: Draft) -> R:
        """Return a record in JSON types as its readers get it; raises msgspec.ValidationError for a wrong type."""
        fields = asdict(msgspec.convert(written, Record))
        fields["kernels"] = fields["kernels"] or (EARLIER["kernels"] if fields["model"] else None)
        return cls(**{name: value for name, value in fields.items() if value is not None}, written=written)

    @property
    def is_open(self) -> bool:
        """Whether the end of the run has not been recorded yet."""
        return self.error.type == UNFINISHED

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was stopped, killed or not even submitted, or still goes on."""
        return self.status == "preempted" or self.error.type in _INTERRUPTED

    @property
    def first_step(self) -> int:
        """The first step of the run's last start."""
        return self.segments[-1].first_step if self.segments else 0

    @property
    def step_seconds(self) -> schema.StepSeconds:
        """The times of the timed steps."""
        return self.metrics.step_seconds or schema.StepSeconds()

    @property
    def throughput(self) -> float | None:
        """Tokens or samples per second; ``None`` for a run that is not ok, or does not train."""
        return self.metrics.rate if self.status == "ok" else None

    @property
    def requested_batch(self) -> int | None:
        """The requested global batch: in a plan, ``global_batch`` may follow from what fits."""
        return self.option("train.global_batch", int) or self.global_batch

    @property
    def prediction_error(self) -> float | None:
        """By which share of the measured step the predicted one is longer; ``None`` without either."""
        rate, expected = self.metrics.samples_per_second, self.predicted.samples_per_second
        return rate / expected - 1 if rate and expected else None

    def option(self, name: str, kind: Any) -> Any:
        """Return an option of the configuration by its dotted name; ``None`` if missing or of another type."""
        return option(self.config, name, kind)

    @property
    def start_command(self) -> str:
        """The command that starts the run, see :func:`start_command`."""
        return start_command(self.launcher, self.config)

    def rerun_command(self) -> str | None:
        """Return the command line for a new run with the same options; ``None`` if the overrides are not recorded."""
        if self.overrides is None:
            return None
        words = [word for word in self.overrides if not affects(word.lstrip("+").partition("=")[0], "start")]
        return f"{self.start_command} {shlex.join([*(self.sources or []), *words])}".rstrip()

    def with_directory(self, directory: str) -> RunRecord:
        """Return the record of a run that lies in this directory now."""
        return replace(self, directory=directory, written={**self.written, "directory": directory})


def parse(text: bytes) -> RunRecord:
    """Parse a record; raises ValueError if it is not one, or has another schema version."""
    written = schema.parse(text)
    version = msgspec.convert(written, Identity).schema
    if version != schema.SCHEMA:
        age, remedy = ("an earlier", "run it again") if version < schema.SCHEMA else ("a later", "update ptdbench")
        rule = f"its schema is {version}, of {age} version of ptdbench than this one, which reads {schema.SCHEMA}"
        raise ValueError(f"{rule}; {remedy}")
    return RunRecord.of(written)


def typed(written: Written) -> RunRecord:
    """Return a record that is in memory, perhaps with NumPy's numbers, as its readers would get it from a file."""
    return RunRecord.of(strict(written))


def option(config: Configuration, name: str, kind: Any) -> Any:
    """Return an option by its dotted name; ``None`` if missing or of another type.

    Types must be checked: the record of a refused run holds what was typed, and a record may come from anywhere.
    """
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    try:
        msgspec.convert(value, kind)
        return value
    except ValueError:  # also raised for text that is not UTF-8
        return None


def start_command(launcher: str | None, config: Configuration) -> str:
    """Return the command that starts a run, without overrides; for a launcher's ranks it is only a template."""
    if options := option(config, "program.options", list[str]):  # any program on virtual GPUs
        return f"{command('virtual')} {shlex.join(options)} --"
    by_hand = launcher not in (None, "local") and not option(config, "cluster.submit", str)
    return under(str(launcher)) if by_hand else command()
