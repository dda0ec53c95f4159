"""Anchors: measured runs that set the level of the predicted times on their device."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from ptdbench.comparison import ranking
from ptdbench.planning import measured, step_time
from ptdbench.problems import Problem, require
from ptdbench.records import load
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Draft, Written
from ptdbench.setup import choices, config
from ptdbench.setup.config import Config
from ptdbench.virtual.device import Device

#: Standard deviation of the logarithm of what one run says of a level; it counts as much as two runs do.
SPREAD, _WEIGHT = 0.0225, 2

#: The same of what differs between an anchor and a plan: torch, or the kernels of the model.
_TORCH, _KERNELS = 0.02, 0.04

#: Maximum number of cached runs that set a level: each is planned first, unless that is cached too.
_MOST_CACHED = 3

#: Two standard deviations: 95 %.
QUANTILE = 1.96


@dataclass(frozen=True)
class Anchor:
    """A measured run."""

    record: RunRecord
    config: Config  #: Of the same run on a virtual GPU.
    is_cached: bool = False  #: Whether it was found in the cache, and not named.

    def fits(self, planned: Config) -> bool:
        """Return whether it says something about a plan: one on the same device, in the same precision."""
        return next(_refusals(self.record, planned), None) is None

    def level(self, fields: Written) -> float:
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
        plans: The plans; one must be on the same device and in the same precision as each run.

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
        usable = [record for record in records if _plan_of(record, plans)]
        reasons = dict.fromkeys(next(_refusals(records[0], planned), "") for planned in plans)
        problems += [] if usable else [Problem("--anchor", str(folder), "; ".join(filter(None, reasons)))]
        anchors += [_anchor(alternative.median_run, plans) for alternative in ranking.group_runs(usable)]
    require(*problems)
    return anchors


def cached(plans: Sequence[Config]) -> list[Anchor]:
    """Return the latest cached runs that were measured on a plan's device under its power limit, with this torch."""
    timed = [planned for planned in plans if (gpu := _gpu(planned)) and not step_time.obstacle(gpu, _nodes(planned))]
    torch = version("torch").partition("+")[0]
    runs = (run for run in measured.runs() if str(run.environment.torch).partition("+")[0] == torch)
    alike = (run for run in runs if _power_limits(run) and _plan_of(run, timed))
    return [replace(_anchor(run, timed), is_cached=True) for run in islice(alike, _MOST_CACHED)] if timed else []


def _gpu(planned: Config) -> Device | None:
    machine = choices.virtual(planned)
    return machine.gpu if machine else None


def _nodes(planned: Config) -> int:
    return 1 if planned.cluster.nodes == "auto" else planned.cluster.nodes


def _power_limits(run: RunRecord) -> set[float]:
    """Return the power limits of a run's GPUs in watts, as far as they are known."""
    return {limit for clocks in run.hardware.clocks or [] if (limit := clocks.power_limit_watts)}


def _plan_of(record: RunRecord, plans: Sequence[Config]) -> Config | None:
    """Return the first plan whose level a run can set."""
    return next((planned for planned in plans if not any(_refusals(record, planned))), None)


def _refusals(record: RunRecord, planned: Config) -> Iterator[str]:
    """Yield why a run cannot be the anchor of a plan."""
    if record.kind:
        yield f"it is {record.kind}: an anchor is measured"
    if record.status != "ok" or not record.metrics.samples_per_second:
        yield f"it has no throughput: {record.status}"
    if len(record.nodes) > 1:
        yield "it ran on several nodes, whose messages have no costs yet"
    gpu, devices = _gpu(planned), record.environment.devices or []
    if not gpu or gpu.name not in devices:
        on = ", ".join(dict.fromkeys(devices)) or "no GPU"
        yield f"it was measured on {on}, and the plan is for {gpu.name if gpu else 'no virtual GPU'}"
    if record.precision != planned.general.precision:
        yield f"its precision is {record.precision}, and the plan's {planned.general.precision}"
    limits = _power_limits(record)
    if gpu and gpu.power and limits - {gpu.power}:
        watts = " and ".join(f"{limit:g}" for limit in sorted(limits))
        yield f"the power limit of its GPUs is {watts} W, and the plan's {gpu.power:g} W; try virtual.gpu.power={watts}"


def _anchor(record: RunRecord, plans: Sequence[Config]) -> Anchor:
    """Return a run as an anchor, with its configuration on the virtual GPUs of a plan."""
    planned = _plan_of(record, plans)
    assert planned
    cluster = {**planned.resolved["cluster"], "nodes": 1, "ranks_per_node": record.world_size}
    virtual = planned.resolved["virtual"]
    options = {**config.of_record(record.written).resolved, "virtual": virtual, "cluster": cluster}
    changes = {"device": "auto", "train.micro_batch": record.layout.micro_batch}
    return Anchor(record, Config(options).changed(changes))


def applied(fields: Written, planned: Config, levels: Sequence[tuple[Anchor, float]]) -> Draft:
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
