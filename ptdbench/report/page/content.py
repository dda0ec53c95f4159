"""Everything that a report shows, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ptdbench.records.alternatives import sweep_of, throughput
from ptdbench.records.load import Run
from ptdbench.records.record import option
from ptdbench.report import block, memory, phases, table
from ptdbench.report.block import Block
from ptdbench.report.differences import by_option, varying
from ptdbench.report.environments import Environments
from ptdbench.report.labels import titles
from ptdbench.report.page import curves, findings, scaling
from ptdbench.report.ranking import Place
from ptdbench.report.reason import reason
from ptdbench.report.sweeps import alternatives_of, command

#: A row of the page: an alternative with figures of its runs, in the units of records.
Row = dict[str, Any]

#: Columns in which the output of other workloads is shown.
_WIDTH = 120


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """The data of a report.

    Args:
        runs: Those to show; their fields ``directory`` say where they are now.

    Returns:
        ``models``: for each model its title, ``rows``, remarks and curves; ``options``: the varying ones by their names
        with a value for each row, as it is typed; ``common``: those that all rows share; ``others``: what other
        workloads found; ``environments``: each that a run had, by the numbers in ``rows``. Rates are in tokens or
        samples a second, times in seconds, sizes in bytes.
    """
    trained = [run for run in runs if run.get("model")]
    blocks = block.blocks(alternatives_of(trained))
    typical = [place.alternative.typical for one in blocks for place in one.ranking.places]
    values = by_option(typical)
    differing = varying(values)
    environments = Environments(runs)
    firsts = accumulate((len(one.ranking.places) for one in blocks), initial=0)
    models = [_model(one, first, differing, environments) for one, first in zip(blocks, firsts, strict=False)]
    others = [run for run in runs if not run.get("model")]
    return {
        "models": models,
        "options": differing,
        "common": {name: texts[0] for name, texts in values.items() if len(set(texts)) == 1},
        "phases": {phase: {"name": name, "color": phases.COLORS[phase]} for phase, name in phases.PHASES.items()},
        "kinds": memory.KINDS,
        "others": [_other(run, title, environments) for run, title in zip(others, titles(others), strict=True)],
        "environments": [
            {"title": title, "values": values}
            for title, values in zip(environments.titles(), environments.found, strict=True)
        ],
    }


def _model(
    found: Block, first: int, differing: Mapping[str, Sequence[str | None]], environments: Environments
) -> dict[str, Any]:
    places = dict(enumerate(found.ranking.places, start=first))
    typical = {number: place.alternative.typical for number, place in places.items()}
    called = dict(zip(places, found.names, strict=True))
    ranked = sum(place.rank is not None for place in places.values())
    rows = [
        {"number": number, "label": label, "name": name, "best": _is_best(place, ranked), **_row(place, environments)}
        for (number, name), label, place in zip(called.items(), found.labels, places.values(), strict=True)
    ]
    return {
        "title": found.title(),
        "unit": block.unit(typical.values()),
        "rows": rows,
        "remarks": found.remarks,
        "why": found.why,
        "scaling": scaling.curves(rows, differing),
        **curves.of_steps(typical, called, differing),
    }


def _is_best(place: Place, ranked: int) -> bool:
    """Whether none of the others is known to be faster, and one to be slower."""
    return place.rank is not None and place.rank[0] == 1 and place.rank[1] < ranked


def _row(place: Place, environments: Environments) -> Row:
    one = place.alternative
    record = one.typical
    metrics = record.get("metrics") or {}
    step = metrics.get("step_seconds") or {}
    return {
        "parallel": record.get("parallel"),
        "sweep": str(sweep_of(record)),
        "status": block.statuses(one.runs),
        "rank": place.rank,
        **_rates(place),
        "step": step.get("mean"),
        "step_p5": step.get("p5"),
        "step_p95": step.get("p95"),
        "memory": metrics.get("peak_memory_bytes"),
        "mfu": metrics.get("mfu"),
        "mfu_causal": metrics.get("mfu_causal"),
        "of_ceiling": metrics.get("share_of_ceiling"),
        "joules": _joules(record),
        "loss": record.get("final_loss"),
        "held_out": block.held_out(record),
        "held_out_text": block.evaluation(record),
        "ranks": record.get("world_size"),
        "nodes": len(record.get("nodes") or []) or None,
        "batch": record.get("global_batch"),
        "phases": None if phases.missing(record) else [phases.step(record).phases[phase] for phase in phases.PHASES],
        "kinds": (kinds := memory.of_largest(record)) and list(kinds.values()),
        "command": command(record),
        "runs": [_run(run, environments) for run in one.runs],
    }


def _rates(place: Place) -> dict[str, Any]:
    """Throughput with its interval, and its ratio to the first row with that of the ratio."""
    against = place.against_best
    known = place.rate is not None and place.margin is not None
    return {
        "rate": place.rate,
        "low": place.rate / (1 + place.margin) if known else None,  # type: ignore[operator]
        "high": place.rate * (1 + place.margin) if known else None,  # type: ignore[operator]
        "ratio": place.ratio,
        "ratio_low": against and against.low,
        "ratio_high": against and against.high,
    }


def _joules(record: Mapping[str, Any]) -> float | None:
    """Energy of a sample, of the GPUs if there are any and else of the CPUs."""
    hardware = record.get("hardware") or {}
    energies = ((hardware.get(kind) or {}).get("joules_per_sample") for kind in ("gpu", "cpu"))
    return next((energy for energy in energies if energy is not None), None)


def _run(run: Mapping[str, Any], environments: Environments) -> dict[str, Any]:
    return {
        "directory": run["directory"],
        "status": run["status"],
        "started": run.get("started"),
        "block": option(run.get("config"), "repeat.block", int),
        "rate": throughput(run),
        "reason": None if run["status"] == "ok" else reason(run),
        "environment": environments.number(run),
    }


def _other(run: Run, title: str, environments: Environments) -> dict[str, Any]:
    """A run that does not train, as its workload shows it, and with curves where there are any."""
    return {
        "title": title,
        "text": table.of_workload(run, _WIDTH),
        "curves": findings.curves(run),
        "command": command(run),
        "runs": [_run(run, environments)],
    }
