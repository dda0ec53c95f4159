"""The Python interface to results: records, with their series as arrays. Nothing here imports torch."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptdbench.records import series, store
from ptdbench.records.effects import leaves
from ptdbench.records.run_record import RunRecord
from ptdbench.terminal import echo

if TYPE_CHECKING:
    import pandas

#: The name of each series, and its column in the file.
SERIES = {
    "losses": "loss",
    "learning_rates": "learning_rate",
    "gradient_norms": "gradient_norm",
    "wait_seconds": "wait_seconds",
    "memory_bytes": "memory_bytes",
    "step_seconds": "step_seconds",
    "slowest_seconds": "slowest_seconds",
}

#: Steps that a damaged file may have lost, which become NaN; if more are missing, the record itself must be wrong.
MOST_LOST = 10_000_000


class Run(Mapping[str, Any]):
    """A run's record: a mapping of its fields, which ``docs/record.md`` describes, and its series."""

    def __init__(self, record: RunRecord, directory: Path) -> None:
        self.directory = directory  #: The run's current directory; the field ``directory`` is the one it ran in.
        self.record = record  #: The record with an attribute for each field.

    def __getitem__(self, field: str) -> Any:
        return self.record.written[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record.written)

    def __len__(self) -> int:
        return len(self.record.written)

    def __repr__(self) -> str:
        shown = {name: self.get(name) for name in ("workload", "model", "parallel", "status", "steps")}
        return f"<Run {self.directory}: {', '.join(f'{name}={value}' for name, value in shown.items() if value)}>"

    def series(self, name: str) -> np.ndarray:
        """One number per step of the run, over all its starts, in float64; unknown numbers are NaN.

        Args:
            name: One of

                - ``losses``: mean loss of the global batch; NaN if it was not finite;
                - ``learning_rates``: ``optimizer.lr`` times the factor of the schedule;
                - ``gradient_norms``: before clipping; NaN without clipping;
                - ``wait_seconds``: wait for the batch, 0 if the GPU still had steps queued; maximum over ranks;
                - ``memory_bytes``: memory in use after the step, maximum over ranks;
                - ``step_seconds``: duration on each rank, ``[steps, ranks]``; NaN for absent ranks;
                - ``slowest_seconds``: duration on the slowest rank.

        Returns:
            ``[steps]``, empty for a workload that does not train. A run in progress has the steps that its ranks have
            gathered so far.

        Raises:
            KeyError: There is no series of that name.
            FileNotFoundError: The run has done steps, but the file of its series is missing.
            ptdbench.records.store.Damaged: The file lacks more steps than it can have lost.
        """
        if name not in SERIES:
            raise KeyError(f"there is no series {name!r}: try {', '.join(SERIES)}")
        path, steps = self.directory / series.NAME, self.record.steps or 0
        if steps and not path.exists():
            raise FileNotFoundError(f"{path} is missing: it holds the series of the run, and belongs to its record")
        values = series.column(series.blocks(path), SERIES[name])
        missing = max(steps - len(values), 0)  # the file was damaged
        if missing > MOST_LOST:
            raise store.Damaged(f"{path} is damaged: it holds {len(values):,} of the {steps:,} steps on record")
        return np.pad(values, ((0, missing), *[(0, 0)] * (values.ndim - 1)), constant_values=np.nan)


class Runs(list[Run]):
    """A list of runs."""

    def frame(self) -> pandas.DataFrame:
        """Return a table with one row per run and one column per record field, by its dotted name.

        For example ``status``, ``metrics.tokens_per_second``, ``layout.shard`` and ``config.optimizer.lr``; lists stay
        lists, and integers that some runs lack integers (``Int64``). ``directory`` is the run's current directory.
        """
        import pandas

        rows = [{**run, "directory": str(run.directory)} for run in self]
        table, flat = pandas.json_normalize(rows), [dict(leaves(row)) for row in rows]
        for name in table.select_dtypes("float"):
            values = [row.get(name) for row in flat]
            if {type(value) for value in values} == {int, type(None)}:
                with suppress(OverflowError):
                    table[name] = pandas.array(values, dtype="Int64")
        groups = {name[:end] for name in table for end, letter in enumerate(name) if letter == "."}
        unknown = [name for name in table if name in groups and table[name].isna().all()]  # of a run without metrics
        return table.drop(columns=unknown)


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run, whose record may be damaged."""
    return os.path.lexists(path / store.RECORD)


def read(path: Path, damaged: list[str] | None = None) -> list[RunRecord]:
    """Read like :func:`load`, but return records, one of a run, with their current directories in ``directory``.

    Damaged ones are reported on standard error, even if nothing can be read, and added to ``damaged``.
    """

    def tell(message: str) -> None:
        echo(message, sys.stderr)
        if damaged is not None:
            damaged.append(message)

    return [store.read_record(path).with_directory(str(path))] if is_run(path) else _of_folder(path, tell)


def load(path: str | Path) -> Run | Runs:
    """Load the records of a run, a sweep, or a folder of either.

    Returns:
        One record for the directory of a run; otherwise a list of runs in natural order of their paths, whose
        ``frame()`` returns a pandas DataFrame. Damaged records are skipped with a warning.

    Raises:
        FileNotFoundError: There are no records.
        ptdbench.records.store.Damaged: ``path`` is the directory of a run, whose record is damaged.
    """
    path = Path(path)
    if is_run(path):
        return Run(store.read_record(path), path)
    return Runs(Run(record, Path(record.directory)) for record in _of_folder(path, warnings.warn))


def _of_folder(folder: Path, tell: Callable[[str], object]) -> list[RunRecord]:
    if records := store.read_runs(folder, tell):
        return records
    if store.run_directories(folder):
        raise FileNotFoundError(f"{folder}: no record there or below can be read")
    if store.is_sweep(folder):
        raise FileNotFoundError(store.without_runs(folder))
    rule = f"no {store.RECORD} there or below"
    raise FileNotFoundError(f"{folder}: {rule}; give the directory of a run or of a sweep, or a folder of them")
