"""Alternatives that a sweep compares: each with all of its runs, which did the same work."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ptdbench.records import ledger, record, store
from ptdbench.records.record import objective_value
from ptdbench.records.schema import Written


@dataclass(frozen=True)
class Alternative:
    """Runs of the same configuration, on as many ranks."""

    runs: list[Written]  #: In the order given; at least one.
    #: Tokens a second of those that are ok, by their blocks of repeats; samples a second where samples are not tokens.
    sample: dict[Hashable, float]

    @cached_property
    def median_run(self) -> Written:
        """The run with the median throughput, of two the slower one; the first one where none is ok."""
        ranked = sorted((run for run in self.runs if throughput(run)), key=lambda run: throughput(run) or 0.0)
        return ranked[(len(ranked) - 1) // 2] if ranked else self.runs[0]


def group(records: Iterable[Written]) -> list[Alternative]:
    """The alternatives among runs, in the order of their first runs."""
    return list(by_identity(records).values())


def of_sweeps(runs: Iterable[Written]) -> list[Alternative]:
    """Those of each sweep, of each side of a comparison, and of each single run: later it may be another program.

    The runs train; their fields ``directory`` say where they are now.
    """
    sweeps: dict[Path, list[Written]] = {}
    is_sweep: dict[Path, bool] = {}
    for run in runs:
        directory, parent = Path(run["directory"]), sweep_of(run)
        if parent not in is_sweep:  # also where only the results of one were kept
            known = store.is_sweep(parent)
            is_sweep[parent] = known or parent != directory.parent or not (directory / store.RECORD).exists()
        sweeps.setdefault(parent if is_sweep[parent] else directory, []).append(run)
    return [one for sweep in sweeps.values() for one in group(sweep)]


def by_identity(
    records: Iterable[Written], ignored: Collection[str] = (), others: Iterable[Written] = ()
) -> dict[Hashable, Alternative]:
    """The alternatives among runs by what their runs have in common and no others have.

    Options of the dotted names ``ignored`` make no difference, besides those that never do. With ``others`` these runs
    will be compared.
    """

    def identity(run: Written) -> Hashable:
        """Equal for two runs if and only if they asked for the same work and the same shape, which may be ``auto``."""
        return run.get("workload"), record.work(record.configuration(run), ignored)

    found: dict[Hashable, Alternative] = {}
    runs = [(identity(run), run) for run in records]
    # One that failed early has not learned where it is: it was to be where the others are that asked for the same.
    known = [*((identity(run), run) for run in others), *reversed(runs)]
    sizes = {asked: run["world_size"] for asked, run in known if run.get("world_size")}
    nodes = {(asked, run.get("world_size")): len(run["nodes"]) for asked, run in known if run.get("nodes")}
    for asked, run in runs:
        size = run.get("world_size") or sizes.get(asked)
        on = len(run.get("nodes") or []) or nodes.get((asked, size))
        one = found.setdefault((asked, size, on), Alternative([], {}))
        one.runs.append(run)
        if rate := throughput(run):
            block = _block(run)
            one.sample[str(run["directory"]) if block in one.sample else block] = rate  # of parallel=ddp,ddp
    return found


def throughput(run: Written) -> float | None:
    """Tokens or samples a second; ``None`` for a run that is not ok, or does not train."""
    return objective_value(run, "throughput")


def sweep_of(run: Written) -> Path:
    """The folder of the sweep that a run is part of; of two sides that took turns, that of its side.

    There each block of a side is a sweep of its own.
    """
    folder = Path(run["directory"]).parent
    sweep = _around(folder) or folder
    return sweep.parent if record.option(run, "repeat.series", str) else sweep


_around = cache(ledger.around)  # a sweep may have thousands of runs


def name_of_sweep(run: Written) -> str:
    """The name of that folder, the same from everywhere: within it, and by a link such as ``outputs/latest``."""
    return sweep_of(run).resolve().name


def _block(run: Written) -> Hashable:
    """Runs of the same block of one series are compared with each other; one without a block has a key of its own."""
    block = record.option(run, "repeat.block", int)
    if block is None:
        return str(Path(run["directory"]))
    return record.option(run, "repeat.series", str) or str(sweep_of(run)), block
