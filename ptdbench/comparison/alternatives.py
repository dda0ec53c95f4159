"""The alternatives that a sweep compares, each with all its runs, which did the same work."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ptdbench.grouping import grouped
from ptdbench.records import ledger, record, store
from ptdbench.records.record import objective_value
from ptdbench.records.schema import Written


@dataclass(frozen=True)
class Alternative:
    """Runs of the same configuration on the same number of ranks."""

    runs: list[Written]  #: The records, in the order given; at least one.
    #: Tokens per second of the runs that are ok, by block of repeats; samples per second if samples are not tokens.
    sample: dict[Hashable, float]

    @cached_property
    def median_run(self) -> Written:
        """The run with the median throughput, of two the slower one; the first run if none is ok."""
        ranked = sorted((run for run in self.runs if throughput(run)), key=lambda run: throughput(run) or 0.0)
        return ranked[(len(ranked) - 1) // 2] if ranked else self.runs[0]


def group(records: Iterable[Written]) -> list[Alternative]:
    """Group runs into alternatives, in the order of their first runs."""
    return list(by_identity(records).values())


def of_sweeps(runs: Iterable[Written]) -> list[Alternative]:
    """Group runs into alternatives separately for each sweep, side of a comparison, and single run.

    They are kept apart because the program may have changed in between. The runs must be training runs, with their
    current locations in ``directory``.
    """
    sweeps: dict[Path, list[Written]] = {}
    is_sweep: dict[Path, bool] = {}
    for run in runs:
        directory, parent = Path(run["directory"]), sweep_of(run)
        if parent not in is_sweep:  # also true if only a sweep's results were kept
            known = store.is_sweep(parent)
            is_sweep[parent] = known or parent != directory.parent or not (directory / store.RECORD).exists()
        sweeps.setdefault(parent if is_sweep[parent] else directory, []).append(run)
    return [one for sweep in sweeps.values() for one in group(sweep)]


def by_identity(
    records: Iterable[Written], ignored: Collection[str] = (), others: Iterable[Written] = ()
) -> dict[Hashable, Alternative]:
    """Group runs into alternatives by their identity: the same requested work and shape, and the same ranks and nodes.

    Options with the dotted names ``ignored`` make no difference, in addition to those that never do. ``others`` are the
    runs that these will be compared with.
    """

    def identity(run: Written) -> Hashable:
        """Return a key that is equal if and only if two runs requested the same work and shape (perhaps ``auto``)."""
        return run.get("workload"), record.work(record.configuration(run), ignored)

    found: dict[Hashable, Alternative] = {}
    runs = [(identity(run), run) for run in records]
    # A run that failed early has not recorded its ranks and nodes: assume those of other runs with the same request.
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
            one.sample[str(run["directory"]) if block in one.sample else block] = rate  # as with parallel=ddp,ddp
    return found


def comparable(found: Iterable[Alternative]) -> list[list[Alternative]]:
    """Group alternatives whose throughputs are comparable, in the order of their first runs; all must train.

    They train a model of the same name and size on samples of the same size and the same global batch. Sizes that a run
    has not recorded, because it failed early, are those of another run with the same options of model and data.
    """
    runs = [(one.median_run, one) for one in found]
    known = {_trained(run): run for run, _ in runs if run.get("parameters")}

    def work(run: Written) -> Hashable:
        sized = run if run.get("parameters") else known.get(_trained(run), run)
        of_sample = record.option(run, "data.image_size", int), sized.get("tokens_per_sample")
        return run["model"], sized.get("parameters"), of_sample, batch(run)

    return [*grouped((work(run), one) for run, one in runs).values()]


def _trained(run: Written) -> str:
    """Return a key of the options of model and data."""
    config = record.configuration(run)
    return json.dumps([config.get("model"), config.get("data")], sort_keys=True, default=str)


def batch(run: Written) -> int | None:
    """Return the requested global batch: in a plan, that of the record may follow from what fits."""
    return record.option(run, "train.global_batch", int) or run.get("global_batch")


def throughput(run: Written) -> float | None:
    """Return tokens or samples per second; ``None`` for a run that is not ok, or does not train."""
    return objective_value(run, "throughput")


def sweep_of(run: Written) -> Path:
    """Return the folder of a run's sweep; in a comparison of two alternating sides, the folder of its side.

    There, each block of a side is a separate sweep.
    """
    folder = Path(run["directory"]).parent
    sweep = _around(folder) or folder
    return sweep.parent if record.option(run, "repeat.series", str) else sweep


_around = cache(ledger.around)  # a sweep may have thousands of runs


def name_of_sweep(run: Written) -> str:
    """Return the name of :func:`sweep_of`, resolved, so that it is the same by a link such as ``outputs/latest``."""
    return sweep_of(run).resolve().name


def _block(run: Written) -> Hashable:
    """Return a key by which runs are paired: the series and the block; unique for a run without a block."""
    block = record.option(run, "repeat.block", int)
    if block is None:
        return str(Path(run["directory"]))
    return record.option(run, "repeat.series", str) or str(sweep_of(run)), block
