"""Anchors: measured runs that set the level of the predicted times on their device."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ptdbench.comparison import ranking
from ptdbench.problems import Problem, require
from ptdbench.records import load
from ptdbench.records.run_record import RunRecord
from ptdbench.setup import choices, config
from ptdbench.setup.config import Config

#: Standard deviation of the logarithm of what one run says of a level; it counts as much as two runs do.
SPREAD, _WEIGHT = 0.0225, 2

#: The same of what differs between an anchor and a plan: torch, or the kernels of the model.
_TORCH, _KERNELS = 0.02, 0.04

#: Two standard deviations: 95 %.
QUANTILE = 1.96


@dataclass(frozen=True)
class Anchor:
    """A measured run."""

    record: RunRecord
    config: Config  #: Of the same run on a virtual GPU.

    def fits(self, planned: Config) -> bool:
        """Return whether it says something about a plan: one on the same device, in the same precision."""
        is_same = planned.general.precision == self.record.precision
        return is_same and _device(planned) in (self.record.environment.devices or ())

    def level(self, fields: Mapping[str, Any]) -> float:
        """Return how many times as long as predicted its step took; ``fields``: of its plan. Raises ConfigError."""
        rate, expected = self.record.metrics.samples_per_second, fields.get("predicted") or {}
        if not rate or not expected.get("step_seconds"):
            why = expected.get("reason") or (fields.get("error") or {}).get("message")
            require(Problem("--anchor", self.record.directory, f"its step cannot be predicted: {why}"))
        return float(expected["samples_per_second"]) / float(rate or 1.0)


def read(folders: Sequence[Path], plans: Sequence[Config]) -> list[Anchor]:
    """Return the anchors in some folders, for plans of a command line.

    Args:
        folders: Each of a run, or of several, of which those count that can; of repeats the one in the middle.
        plans: The plans; some must be on the same device and in the same precision as each run.

    Raises:
        ConfigError: A folder has no run that can be an anchor.
    """
    anchors, problems = [], []
    for folder in folders:
        try:
            records = load.read(folder)
        except (OSError, ValueError) as error:
            problems.append(Problem("--anchor", str(folder), str(error)))
            continue
        refused = [next(_refusals(record, plans), None) for record in records]
        usable = [record for record, reason in zip(records, refused, strict=True) if not reason]
        problems += [] if usable else [Problem("--anchor", str(folder), str(refused[0]))]
        measured = (alternative.median_run for alternative in ranking.group_runs(usable))
        anchors += [Anchor(record, _on_virtual_gpu(record, plans)) for record in measured]
    require(*problems)
    return anchors


def _device(planned: Config) -> str | None:
    machine = choices.virtual(planned)
    return machine.gpu.name if machine else None


def _refusals(record: RunRecord, plans: Sequence[Config]) -> Iterator[str]:
    """Yield why a run cannot be an anchor."""
    if record.kind:
        yield f"it is {record.kind}: an anchor is measured"
    if record.status != "ok" or not record.metrics.samples_per_second:
        yield f"it has no throughput: {record.status}"
    if len(record.nodes) > 1:
        yield "it ran on several nodes, whose messages have no costs yet"
    devices = {_device(planned) for planned in plans} - {None}
    if not devices.intersection(record.environment.devices or ()):
        measured = ", ".join(dict.fromkeys(record.environment.devices or ())) or "no GPU"
        yield f"it was measured on {measured}, and the plan is for {', '.join(map(str, devices)) or 'no virtual GPU'}"
    precisions = {planned.general.precision for planned in plans}
    if record.precision not in precisions:
        yield f"its precision is {record.precision}, and the plan's {', '.join(precisions)}"


def _on_virtual_gpu(record: RunRecord, plans: Sequence[Config]) -> Config:
    """Return the configuration of a run, on the virtual GPUs of a plan."""
    of_plan = next(planned for planned in plans if _device(planned) in (record.environment.devices or ())).resolved
    cluster = {**of_plan["cluster"], "nodes": 1, "ranks_per_node": record.world_size}
    measured = Config({**config.of_record(record.written).resolved, "virtual": of_plan["virtual"], "cluster": cluster})
    return measured.changed({"device": "auto", "train.micro_batch": record.layout.micro_batch})


def applied(fields: Mapping[str, Any], planned: Config, levels: Sequence[tuple[Anchor, float]]) -> dict[str, Any]:
    """Return the fields of a plan whose predicted step has the level of the anchors that fit it.

    Several levels are averaged in log space, and the spread of their logarithms widens or narrows the interval.
    """
    step = fields.get("predicted") or {}
    fitting = [(anchor, math.log(level)) for anchor, level in levels if anchor.fits(planned)]
    if not fitting or not step.get("step_seconds"):
        return dict(fields)
    mean = fmean(level for _, level in fitting)
    squares = sum((level - mean) ** 2 for _, level in fitting)
    variance = (_WEIGHT * SPREAD**2 + squares) / (_WEIGHT + len(fitting) - 1) * (1 + 1 / len(fitting))
    torch, kernels = (fields.get("environment") or {}).get("torch"), planned.general.kernels
    records = [anchor.record for anchor, _ in fitting]
    doubts = {f"torch {run.environment.torch}": _TORCH for run in records if run.environment.torch != torch}
    doubts |= {f"kernels={run.kernels}": _KERNELS for run in records if run.kernels != kernels}
    margin = math.exp(QUANTILE * math.sqrt(variance + sum(doubt**2 for doubt in doubts.values())))
    names = ", ".join(dict.fromkeys(run.directory for run in records))
    wider = f" ({', '.join(doubts)}, so the interval is wider)" if doubts else ""
    return {**fields, "predicted": _scaled(step, math.exp(mean), margin) | {"anchor": f"{names}{wider}"}}


def _scaled(step: Mapping[str, Any], level: float, margin: float) -> dict[str, Any]:
    """Return a predicted step that takes ``level`` times as long."""
    seconds = step["step_seconds"] * level
    rates = {name: rate / level for name in ("tokens_per_second", "samples_per_second", "mfu") if (rate := step[name])}
    groups = ("parts", "phases", "twice_as_fast")
    spans = {name: {key: of * level for key, of in (step.get(name) or {}).items()} for name in groups}
    return {**step, "step_seconds": seconds, "low": seconds / margin, "high": seconds * margin, **rates, **spans}
