"""The alternatives that a sweep compares, each with all its runs, which did the same work."""

import json
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ptdbench.grouping import grouped
from ptdbench.records import ledger, store
from ptdbench.records.record import work
from ptdbench.records.run_record import RunRecord


@dataclass(frozen=True)
class Alternative:
    """Runs of the same configuration on the same number of ranks."""

    runs: list[RunRecord]  #: The records, in the order given; at least one.
    #: Tokens per second of the runs that are ok, by block of repeats; samples per second if samples are not tokens.
    sample: dict[Hashable, float]

    @cached_property
    def median_run(self) -> RunRecord:
        """The run with the median throughput, of two the slower one; the first run if none is ok."""
        ranked = sorted((run for run in self.runs if run.throughput), key=lambda run: run.throughput or 0.0)
        return ranked[(len(ranked) - 1) // 2] if ranked else self.runs[0]


def group(records: Iterable[RunRecord]) -> list[Alternative]:
    """Group runs into alternatives, in the order of their first runs."""
    return list(by_identity(records).values())


def of_sweeps(runs: Iterable[RunRecord]) -> list[Alternative]:
    """Group runs into alternatives separately for each sweep, side of a comparison, and single run.

    The program may have changed between them. The runs must be training runs, with their current locations in
    ``directory``.
    """
    sweeps: dict[Path, list[RunRecord]] = {}
    is_sweep: dict[Path, bool] = {}
    for run in runs:
        directory, parent = Path(run.directory), sweep_of(run)
        if parent not in is_sweep:  # also true of records without files
            is_nested = parent != directory.parent
            is_sweep[parent] = store.is_sweep(parent) or is_nested or not (directory / store.RECORD).exists()
        sweeps.setdefault(parent if is_sweep[parent] else directory, []).append(run)
    return [alternative for sweep in sweeps.values() for alternative in group(sweep)]


def by_identity(
    records: Iterable[RunRecord], ignored: Collection[str] = (), others: Iterable[RunRecord] = ()
) -> dict[Hashable, Alternative]:
    """Group runs into alternatives by their identity: the same requested work and shape, and the same ranks and nodes.

    ``ignored``: dotted names of options that make no difference, in addition to those that never do; ``others``: the
    runs to compare these with.
    """

    def identity(run: RunRecord) -> Hashable:
        """Return a key that is equal if and only if two runs requested the same work and shape (perhaps ``auto``)."""
        return run.workload, work(run.config, ignored)

    alternatives: dict[Hashable, Alternative] = {}
    runs = [(identity(run), run) for run in records]
    # A run that failed early has not recorded its ranks and nodes: take them from other runs with the same request.
    sources = [*((identity(run), run) for run in others), *reversed(runs)]
    sizes = {request: run.world_size for request, run in sources if run.world_size}
    nodes = {(request, run.world_size): len(run.nodes) for request, run in sources if run.nodes}
    for request, run in runs:
        size = run.world_size or sizes.get(request)
        on = len(run.nodes) or nodes.get((request, size))
        alternative = alternatives.setdefault((request, size, on), Alternative([], {}))
        alternative.runs.append(run)
        if rate := run.throughput:
            block = _block(run)
            alternative.sample[run.directory if block in alternative.sample else block] = rate  # parallel=ddp,ddp
    return alternatives


def comparable(alternatives: Iterable[Alternative]) -> list[list[Alternative]]:
    """Group alternatives whose throughputs are comparable, in the order of their first runs; all must train.

    They train a model of the same name and size on samples of the same size with the same global batch. Sizes missing
    from a run that failed early are taken from another run with the same options of model and data.
    """
    runs = [(alternative.median_run, alternative) for alternative in alternatives]
    complete = {_trained(run): run for run, _ in runs if run.parameters}

    def size(run: RunRecord) -> Hashable:
        sized = run if run.parameters else complete.get(_trained(run), run)
        of_sample = run.option("data.image_size", int), sized.tokens_per_sample
        return run.model, sized.parameters, of_sample, run.requested_batch

    return [*grouped((size(run), alternative) for run, alternative in runs).values()]


def _trained(run: RunRecord) -> str:
    """Return a key of the options of model and data."""
    return json.dumps([run.config.get("model"), run.config.get("data")], sort_keys=True, default=str)


def sweep_of(run: RunRecord) -> Path:
    """Return the folder of a run's sweep; in a comparison, whose blocks are separate sweeps, of its side."""
    folder = Path(run.directory).parent
    sweep = _around(folder) or folder
    return sweep.parent if run.option("repeat.series", str) else sweep


_around = cache(ledger.around)  # a sweep may have thousands of runs


def name_of_sweep(run: RunRecord) -> str:
    """Return the name of :func:`sweep_of`, with links such as ``outputs/latest`` resolved."""
    return sweep_of(run).resolve().name


def _block(run: RunRecord) -> Hashable:
    """Return the key that pairs runs: the series and the block; unique for a run without a block."""
    block = run.option("repeat.block", int)
    if block is None:
        return str(Path(run.directory))
    return run.option("repeat.series", str) or str(sweep_of(run)), block
